/* The tasks of a step's attention, and what computes them. */

#pragma once

#include "model.h"

#define QUERIES 16 /* of a task in tiles */

/* Queries that are computed together: some of one segment, or all of several that share pages. */
typedef struct {
    const Segment *segments[QUERIES];
    int32_t num_segments, shared; /* pages */
    int32_t kv_head, first, count; /* queries */
    long before, cost; /* of the tasks before it, and its own */
} Task;

/* Returns memory that is to be freed, or null. */
Task *list_tasks(const Model *model, const Step *step, int *num_tasks);
void attention(const Model *model, const Layer *layer, const Step *step, const Task *tasks, int num_tasks);

/* Of a cache in tiles. */
long tiled_scratch(const Model *model, long longest);
char *tiled_key(const Model *model, const Layer *layer, int page, int kv_head, int offset, int dim);
char *tiled_value(const Model *model, const Layer *layer, int page, int kv_head, int offset, int dim);
void put_in_tiles(const Model *model, const Layer *layer, int page, int kv_head, int offset, const float *key,
                  const float *value);
void attend_in_tiles(const Model *model, const Layer *layer, const Task *task, const float *qkv, long qkv_stride,
                     float *attended, float *memory, const Task *after);
