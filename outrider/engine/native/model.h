/* The structures that engine.py fills (build.py reads their declarations), and what the files offer each other. */

#pragma once

#include "vectors.h"

#define PAGE 32           /* tokens of a page; a multiple of every PANEL */
#define PANEL (2 * LANES) /* outputs computed together */
#define FAR 4096 /* prefetch distance of weights from memory for one block of rows, bytes */
#define NEAR 640 /* and from the second-level cache into the first */

/* How weights are packed. The first two: [outputs / PANEL, 2, inputs, LANES], the last panel padded with zeros. Two
 * streams of weights use more memory bandwidth than one. The others are the blocks of GGUF files, see formats.h. */
enum { FLOAT32 = 0, BFLOAT16 = 1, NIBBLES = 2, BYTES = 3, NIBBLES_K = 4, FIVE_K = 5, SIX_K = 6 };
enum { IN_FLOATS = 0, IN_TILES = 1, IN_INTEGERS = 2 }; /* products.c, tiles.c, integers.h and integers_tiles.c */
enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };
enum { NO_NORM = 0, RMS = 1, LAYER = 2 };

typedef struct {
    const void *weights;
    const float *scales; /* one per output, int8 only */
    const float *bias;   /* or null */
    int32_t inputs, outputs, kind;
    int32_t arithmetic; /* IN_FLOATS, IN_TILES or IN_INTEGERS, for which it is packed */
} Linear;

typedef struct {
    const float *weight, *bias; /* bias may be null */
    float eps;
    int32_t kind;
} Norm;

typedef struct {
    /* Up to three parts one after the other; up: gate and up when gated. */
    Linear qkv[3], out[3], up[3], down[3];
    Norm attention_in, attention_out, mlp_in, mlp_out, query, key;
    /* Panels of head dim by PAGE, and of PAGE by head dim: [pages, layers, kv heads, panels, 2, ..., LANES]. */
    void *keys, *values;
    int32_t window;       /* 0: all */
    int32_t rope;         /* index of cos and sin; −1: none */
    float scale;
    int32_t unused;
} Layer;

/* Of steps with as many rows, see paces.c. */
typedef struct {
    int32_t halvings;  /* of the threads */
    int32_t trial;     /* halvings that are tried beyond these: 1 or −1 */
    int32_t pause, at; /* steps before a comparison, and since the last one */
    float own, other;  /* seconds of the steps compared, without and with the trial */
    float usual;       /* seconds of a step at the last comparison */
    int32_t slow;      /* steps in a row that took much longer than usual */
} Pace;

typedef struct {
    Layer *layers;
    Norm final;
    Linear head;
    int32_t num_layers, hidden, heads, kv_heads, head_dim, inner;
    int32_t rotated; /* rotated dimensions of a head */
    int32_t gated, activation, parallel;
    float softcap; /* 0: none */
    int32_t cache_bytes; /* of a number of keys and values: 4, or 2 for bfloat16 */
    int32_t tiled_cache; /* keys and values are laid out for attention_tiles.c */
    int32_t unused;
    Linear rough; /* the head in NIBBLES, see guesses.c; of no outputs: none */
    Pace paces[7]; /* of 1, 2 to 3, 4 to 7, ... rows */
} Model;

typedef struct {
    int32_t start, count;  /* rows of the step */
    int32_t base;          /* tokens cached before */
    int32_t unused;
    const int32_t *table;  /* pages */
    const uint8_t *sees;   /* [count, count] for a tree, null for a chain */
    const int32_t *depths; /* [count] for a tree, null for a chain */
} Segment;

/* Where the threads of a step wait for each other, see meeting.c. */
typedef struct {
    int32_t arrived, round;
    int32_t sleeping[2]; /* of even and odd rounds: whether any thread has begun to sleep */
    int32_t late;        /* whether one had to be woken last */
    float patience;      /* seconds */
    int32_t moves;       /* of threads to other cores */
    int32_t cores[64];   /* of the first threads: the core, from 1, where each came to its last meeting */
} Meeting;

#define NOTED_THREADS 64
#define PATIENCE 200e-6f
#define NEW_MEETING (Meeting){.late = 1, .patience = PATIENCE} /* late: the threads of a new region were asleep */

typedef struct {
    int32_t rows, num_segments, num_wanted, num_logits, threads, num_states;
    int32_t guesses; /* its logits are only guessed from: see guesses.c */
    int32_t exact;   /* products in integers are computed in float32 */
    const Segment *segments;
    const int32_t *wanted; /* rows with an output, those with logits first */
    const int32_t *positions;      /* [rows] */
    const float *cos[2], *sin[2]; /* by position: [positions, rotated] */
    float *x;      /* [rows, hidden] in: embeddings */
    float *hidden; /* [wanted, hidden] out */
    float *logits; /* [num_logits, outputs of the head] out */
    const int32_t *layers; /* [num_states], after which the residual is captured */
    float *states;         /* [wanted, num_states, hidden] out */
    float *scratch; /* of outrider_scratch() numbers; the rest is laid out in it */
    float *normed, *mixed, *inner, *attended, *scores, *tiles, *peaks;
    long scores_per_thread;
    Meeting *meeting; /* of the threads of the present region */
} Step;

/* What a chain's rows are made from, see chain.c. */
typedef struct {
    Linear mix;          /* of the state before a row */
    const float *inputs; /* [columns of the logits, hidden]: the part of each token */
    const float *states; /* [given, hidden], before the first rows */
    int32_t *columns;    /* [rows + 1] of the tokens and the one after them: the first ones are given */
    const int64_t *ids;  /* of the columns */
    const uint64_t *keys; /* of the noise, for each token that is found */
    int32_t given;
    float temperature; /* 0: the likeliest tokens */
} Chain;

/* The prefetch during a product: in both streams of a panel, this many bytes further with every input. */
typedef struct {
    const char *at;
    long step;
} Ahead;

typedef void Accumulate(int rows, const float *x, long x_stride, const void *panel, int inputs, int first, int end,
                        Ahead ahead, float *out, long out_stride);
Accumulate begin_floats, go_on_floats, begin_halves, go_on_halves;

void normalise(const Norm *norm, const float *x, int width, float *y);

/* So few rows are prepared by each thread for itself: to wait for the others takes longer. */
#define OWN_ROWS 4

/* The threads of a parallel region share the work of the functions from here on, and wait for each other at their end. */

/* Of a linear map's parts. */
void products(const Linear parts[3], const float *x, int rows, float *y, long y_stride, int add, const Step *step);
void product(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step);
void product_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step);
void product_integers(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step);
void product_integers_vnni(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step);
void product_integers_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step);
#define FEWEST_IN_TILES 16 /* of rows: in a trial, 9 took the same time with VNNI, and 16 took 0.76 of it */
int has_vnni(void), has_tiles(void);
void finish_outputs(const Linear *linear, long first, int width, float *from, float *to, int add);
void product_nibbles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step);
void product_nibbles_vnni(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step);
#define CANDIDATES 16 /* outputs of a guess with all bits: 8 miss 6 of 8,000 argmaxes of the default target's head, 16 none */
void guess_logits(const Model *model, const Step *step);
int bytes_as_floats(const Linear *head, int output, int block, float *to);
float logit_of(const Linear *head, const float *x, int output);
int likeliest(const float *logits, int count);
long tiles_scratch(int inputs, int rows, int threads), integers_scratch(int inputs, int rows, int threads);
const float *normalise_rows(const Norm *norm, const float *x, const Step *step, int width);
void add_normalised(const Norm *norm, float *y, int width, const Step *step);
void activate(float *x, const Model *model, float *y, const Step *step);
void meet(const Step *step);

int64_t outrider_scratch(const Model *model, Step *step);
int outrider_forward(Model *model, Step *step);

Pace *pace_of(Model *model, int rows);
int outrider_pace_threads(const Pace *pace, int threads);
void outrider_pace_record(Pace *pace, int threads, float seconds);
