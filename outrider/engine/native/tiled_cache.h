/* Where keys and values lie in the pages of a cache that attention_tiles.c reads. */

#pragma once

#include "amx.h"

#if TILES

INLINE int blocks_of(const Model *model) { return (model->head_dim + 31) / 32; }
INLINE int panels_of(const Model *model) { return (model->head_dim + 15) / 16; }
INLINE long tiled_keys(const Model *model) { return 2l * blocks_of(model) * TILE; }
INLINE long tiled_values(const Model *model) { return (long)panels_of(model) * TILE; }
INLINE const char *page_at(const Model *model, const void *cache, long size, int page, int kv_head) {
    return (const char *)cache + ((long)page * model->num_layers * model->kv_heads + kv_head) * size;
}

#endif
