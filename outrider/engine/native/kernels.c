/* A decoder's forward pass on a CPU: a ragged batch of tokens (rows), keys and values in blocks (pages), packed weights.
 *
 * Every number of a row results from the same operations in the same order,
 * whatever other rows the step has. A session's logits do not depend on other
 * sessions, on how its prompt was split, or on the number of guesses:
 * - a product sums over its inputs one by one, in order (`accumulate`);
 * - attention computes its largest score before it sums, and sums key by key
 *   in order, so masked keys between others change nothing (trees).
 *
 * The operations are also the same for every vector width. A sum over lanes
 * always has 16 of them (`WIDE`), in one, two or four registers, added in one
 * order. Fused operations are explicit (`fused`), not left to the compiler.
 * The only rounding function of the C library in use is the square root, which
 * is exact everywhere.
 *
 * Plain C with GCC's vector types: AVX-512, AVX2 and NEON come from -march.
 * build.py compiles it, and engine.py calls it and mirrors the structures
 * below.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define ARITHMETIC 1 /* raise it when the bits of any result change */
#if defined(__FMA__) || defined(__aarch64__)
#define FUSED 1
#else
#define FUSED 0 /* different bits */
#endif

#if defined(__AVX512F__)
#define LANES 16
#define MAX_ROWS 12
#elif defined(__AVX__)
#define LANES 8
#define MAX_ROWS 6
#else
#define LANES 4
#define MAX_ROWS 6
#endif

#define WIDE 16 /* lanes of a sum on every machine */
#define PARTS (WIDE / LANES)
#define PANEL (2 * LANES) /* outputs computed together */
#define PAGE 32           /* tokens of a page; a multiple of every PANEL */
#define FAR 4096 /* prefetch distance of weights from memory for one block of rows, bytes */
#define NEAR 640 /* and from the second-level cache into the first */
#define TURN 64  /* inputs that one block of rows processes before the next block */
#define SLICE (8 * MAX_ROWS)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };
static const int WIDTH[] = {4, 2, 1}; /* bytes of a weight, by kind */
enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };
enum { NO_NORM = 0, RMS = 1, LAYER = 2 };

/* Weights in panels: [outputs / PANEL, 2, inputs, LANES], the last panel padded with zeros. Two streams of weights use
 * more memory bandwidth than one. */
typedef struct {
    const void *weights;
    const float *scales; /* one per output, int8 only */
    const float *bias;   /* or null */
    int32_t inputs, outputs, kind, unused;
} Linear;

typedef struct {
    const float *weight, *bias; /* bias may be null */
    float eps;
    int32_t kind;
} Norm;

typedef struct {
    Linear qkv, out, up, down; /* up: gate and up one after the other when gated */
    Norm attention_in, attention_out, mlp_in, mlp_out, query, key;
    float *keys, *values; /* panels of head dim by PAGE, and of PAGE by head dim: [pages, kv heads, panels, 2, ..., LANES] */
    int32_t window;       /* 0: all */
    int32_t rope;         /* index of cos and sin; −1: none */
    float scale;
    int32_t unused;
} Layer;

typedef struct {
    Layer *layers;
    Norm final;
    Linear head;
    int32_t num_layers, hidden, heads, kv_heads, head_dim, inner;
    int32_t rotated; /* rotated dimensions of a head */
    int32_t gated, activation, parallel;
    float softcap; /* 0: none */
    int32_t unused;
} Model;

typedef struct {
    int32_t start, count;  /* rows of the step */
    int32_t base;          /* tokens cached before */
    int32_t unused;
    const int32_t *table;  /* pages */
    const uint8_t *sees;   /* [count, count] for a tree, null for a chain */
    const int32_t *depths; /* [count] for a tree, null for a chain */
} Segment;

typedef struct {
    int32_t rows, num_segments, num_wanted, num_logits, threads, unused;
    const Segment *segments;
    const int32_t *wanted; /* rows with an output, those with logits first */
    const float *cos[2], *sin[2];
    float *x;      /* [rows, hidden] in: embeddings */
    float *hidden; /* [wanted, hidden] out */
    float *logits; /* [num_logits, outputs of the head] out */
    float *normed, *mixed, *inner, *attended, *scores;
    int64_t scores_per_thread;
} Step;

/* -- vectors ------------------------------------------------------------- */

INLINE vec spread(float a) { return a - (vec){0}; }
INLINE vec load(const float *p) { return *(const loose_vec *)p; }
INLINE void store(float *p, vec v) { *(loose_vec *)p = v; }

INLINE vec larger(vec a, vec b) {
    ivec which = a > b;
    return (vec)(((ivec)a & which) | ((ivec)b & ~which));
}

/* a · b + c, rounded once. */
INLINE vec fused(vec a, vec b, vec c) {
#if FUSED && defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FUSED && defined(__AVX__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif FUSED
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float fused_one(float a, float b, float c) { return FUSED ? __builtin_fmaf(a, b, c) : a * b + c; }

INLINE float sum(const vec *parts) {
    float total = 0;
    for (int p = 0; p < PARTS; p++)
        for (int i = 0; i < LANES; i++) total += parts[p][i];
    return total;
}

INLINE vec where(ivec which, vec a, vec b) { return (vec)(((ivec)a & which) | ((ivec)b & ~which)); }
INLINE vec size(vec x) { return (vec)((ivec)x & 0x7fffffff); }
INLINE vec with_sign(vec x, vec of) { return (vec)((ivec)x | ((ivec)of & (ivec)spread(-0.0f))); }

/* e^x, within 2 units in the last place; 0 below −87, and no more than e^88, which is nearly the largest number. */
INLINE vec exponential(vec x) {
    ivec dead = x < spread(-87.0f);
    x = -larger(-larger(x, spread(-87.0f)), spread(-88.0f));
    vec n = fused(x, spread(1.44269504088896341f), spread(12582912.0f)); /* rounds to an integer in the low bits */
    ivec power = (ivec)n << 23;
    n -= 12582912.0f;
    vec r = fused(n, spread(2.12194440e-4f), fused(n, spread(-0.693359375f), x));
    vec p = spread(1.9875691500e-4f);
    p = fused(p, r, spread(1.3981999507e-3f));
    p = fused(p, r, spread(8.3334519073e-3f));
    p = fused(p, r, spread(4.1665795894e-2f));
    p = fused(p, r, spread(1.6666665459e-1f));
    p = fused(p, r, spread(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    return (vec)(((ivec)p + power) & ~dead);
}

/* Within 2 units in the last place: a polynomial near 0 (Cephes), elsewhere by e^2x. */
INLINE vec hyperbolic_tangent(vec x) {
    vec a = size(x), s = x * x, p = spread(-5.70498872745e-3f);
    p = fused(p, s, spread(2.06390887954e-2f));
    p = fused(p, s, spread(-5.37397155531e-2f));
    p = fused(p, s, spread(1.33314422036e-1f));
    p = fused(p, s, spread(-3.33332819422e-1f));
    vec far = with_sign(1.0f - 2.0f / (exponential(2.0f * a) + 1.0f), x);
    return where(a < spread(0.625f), fused(p * s, x, x), far);
}

/* The error function within 2 units in the last place, by N. Juffa's two polynomials. */
INLINE vec error_function(vec x) {
    vec t = size(x), s = x * x;
    vec r = fused(spread(-1.72853470e-5f), t, spread(3.83197126e-4f));
    vec u = fused(spread(-3.88396438e-3f), t, spread(2.42546219e-2f));
    r = fused(r, s, u);
    r = fused(r, t, spread(-1.06777877e-1f));
    r = fused(r, t, spread(-6.34846687e-1f));
    r = fused(r, t, spread(-1.28717512e-1f));
    r = fused(r, t, -t);
    vec far = with_sign(1.0f - exponential(r), x);
    vec p = spread(-5.96761703e-4f);
    p = fused(p, s, spread(4.99119423e-3f));
    p = fused(p, s, spread(-2.67681349e-2f));
    p = fused(p, s, spread(1.12819925e-1f));
    p = fused(p, s, spread(-3.76125336e-1f));
    p = fused(p, s, spread(1.28379166e-1f));
    return where(t > spread(0.927734375f), far, fused(p, x, x));
}

/* x into (−cap, cap). `count` is a multiple of LANES. */
INLINE void cap_scores(float *x, int count, float cap) {
    for (int i = 0; i < count; i += LANES) store(x + i, hyperbolic_tangent(load(x + i) / cap) * cap);
}

/* -- products ------------------------------------------------------------ */

/* GCC 12 would convert lane by lane where a processor has one instruction for all. */
INLINE vec from_bytes(const int8_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const bytes *)p, ivec), vec);
#endif
}

INLINE vec from_halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)p, ivec) << 16);
#endif
}

INLINE vec load_weights(const int kind, const void *panel, long at) {
    if (kind == FLOAT32) return load((const float *)panel + at);
    if (kind == BFLOAT16) return from_halves((const uint16_t *)panel + at);
    return from_bytes((const int8_t *)panel + at);
}

/* The prefetch during a product: in both streams of a panel, this many bytes further with every input. */
typedef struct {
    const char *at;
    long step;
} Ahead;

/* out[rows][PANEL] (+)= x[rows][first to end] · panel, one input after the other. */
INLINE void accumulate(const int kind, const int rows, const float *x, long x_stride, const void *panel, int inputs,
                       int first, int end, Ahead ahead, float *out, long out_stride, const int onto) {
    vec acc[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) acc[r][i] = onto ? load(out + r * out_stride + i * LANES) : (vec){0};
    for (int k = first; k < end; k++, ahead.at += ahead.step) {
        vec w[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            long at = ((long)i * inputs + k) * LANES;
            if (k * LANES * WIDTH[kind] % 64 == 0) { /* a cache line begins */
                __builtin_prefetch((const char *)panel + at * WIDTH[kind] + NEAR, 0, 3);
                __builtin_prefetch(ahead.at + (long)i * inputs * LANES * WIDTH[kind], 0, 2);
            }
            w[i] = load_weights(kind, panel, at);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vec xs = spread(x[r * x_stride + k]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) acc[r][i] = fused(w[i], xs, acc[r][i]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) store(out + r * out_stride + i * LANES, acc[r][i]);
}

/* The loops above, specialised for every count of rows: sums stay in registers. */
#define CASE(kind, rows, ...) \
    case rows: accumulate(kind, rows, __VA_ARGS__); break;
#define FEW_ROWS(kind, ...)                                                                     \
    CASE(kind, 1, __VA_ARGS__) CASE(kind, 2, __VA_ARGS__) CASE(kind, 3, __VA_ARGS__)            \
    CASE(kind, 4, __VA_ARGS__) CASE(kind, 5, __VA_ARGS__) CASE(kind, 6, __VA_ARGS__)
#if MAX_ROWS == 12
#define ALL_ROWS(kind, ...)                                                                     \
    FEW_ROWS(kind, __VA_ARGS__)                                                                 \
    CASE(kind, 7, __VA_ARGS__) CASE(kind, 8, __VA_ARGS__) CASE(kind, 9, __VA_ARGS__)            \
    CASE(kind, 10, __VA_ARGS__) CASE(kind, 11, __VA_ARGS__) CASE(kind, 12, __VA_ARGS__)
#else
#define ALL_ROWS FEW_ROWS
#endif

#define ACCUMULATE(name, kind, onto)                                                                           \
    static void name(int rows, const float *x, long x_stride, const void *panel, int inputs, int first, int end, \
                     Ahead ahead, float *out, long out_stride) {                                               \
        switch (rows) { ALL_ROWS(kind, x, x_stride, panel, inputs, first, end, ahead, out, out_stride, onto) } \
    }
ACCUMULATE(begin_floats, FLOAT32, 0)
ACCUMULATE(go_on_floats, FLOAT32, 1)
ACCUMULATE(begin_halves, BFLOAT16, 0)
ACCUMULATE(go_on_halves, BFLOAT16, 1)
ACCUMULATE(begin_bytes, INT8, 0)
ACCUMULATE(go_on_bytes, INT8, 1)

typedef void Accumulate(int, const float *, long, const void *, int, int, int, Ahead, float *, long);
static Accumulate *const BEGIN[] = {begin_floats, begin_halves, begin_bytes};
static Accumulate *const GO_ON[] = {go_on_floats, go_on_halves, go_on_bytes};

static void product_panel(const Linear *linear, int panel, const float *x, int rows, float *out, float *y,
                          long y_stride, int add) {
    int inputs = linear->inputs, first = panel * PANEL;
    int outputs = linear->outputs - first < PANEL ? linear->outputs - first : PANEL;
    const char *weights = (const char *)linear->weights + (long)first * inputs * WIDTH[linear->kind];
    /* More rows than fit in registers are processed in turns; each block of rows prefetches a share of the next turn's
     * weights. */
    long wide = LANES * WIDTH[linear->kind];
    int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS, turn = blocks > 1 && blocks <= 4 ? TURN : inputs;
    for (int k = 0; k < inputs; k += turn) {
        const char *next = k + turn < inputs ? weights + (k + turn) * wide : weights + 2 * inputs * wide;
        for (int b = 0, r = 0; b < blocks; b++) {
            int count = (rows - r) / (blocks - b);
            Ahead ahead = blocks == 1 ? (Ahead){weights + FAR, wide} : (Ahead){next + b * turn * wide / blocks, wide / blocks};
            (k ? GO_ON : BEGIN)[linear->kind](count, x + (long)r * inputs, inputs, weights, inputs, k,
                                             k + turn < inputs ? k + turn : inputs, ahead, out + r * PANEL, PANEL);
            r += count;
        }
    }
    for (int r = 0; r < rows; r++) {
        float *from = out + r * PANEL, *to = y + r * y_stride + first;
        if (linear->scales)
            for (int i = 0; i < outputs; i++) from[i] *= linear->scales[first + i];
        if (linear->bias)
            for (int i = 0; i < outputs; i++) from[i] += linear->bias[first + i];
        if (outputs < PANEL)
            for (int i = 0; i < outputs; i++) to[i] = add ? to[i] + from[i] : from[i];
        else
            for (int i = 0; i < PANEL; i += LANES) store(to + i, add ? load(to + i) + load(from + i) : load(from + i));
    }
}

/* y[rows][outputs] (+)= x[rows][inputs] · weights. */
static void product(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, int threads) {
    int panels = (linear->outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int panel = 0; panel < panels; panel++) {
        float out[SLICE * PANEL];
        for (int r = 0; r < rows; r += SLICE)
            product_panel(linear, panel, x + (long)r * linear->inputs, rows - r < SLICE ? rows - r : SLICE, out,
                          y + r * y_stride, y_stride, add);
    }
}

/* -- norms and activations ----------------------------------------------- */

static void normalise(const Norm *norm, const float *x, int width, float *y) {
    float mean = 0;
    if (norm->kind == LAYER) {
        for (int i = 0; i < width; i++) mean += x[i];
        mean /= width;
    }
    vec squares[PARTS] = {{0}};
    float rest = 0;
    int i = 0;
    for (; i + WIDE <= width; i += WIDE)
        for (int p = 0; p < PARTS; p++) {
            vec v = load(x + i + p * LANES) - mean;
            squares[p] = fused(v, v, squares[p]);
        }
    for (; i < width; i++) rest = fused_one(x[i] - mean, x[i] - mean, rest);
    float factor = 1.0f / sqrtf((sum(squares) + rest) / width + norm->eps);
    for (i = 0; i < width; i++) y[i] = (x[i] - mean) * factor * norm->weight[i];
    if (norm->bias)
        for (i = 0; i < width; i++) y[i] += norm->bias[i];
}

static void normalise_rows(const Norm *norm, const float *x, int rows, int width, float *y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 4)
    for (int r = 0; r < rows; r++) normalise(norm, x + (long)r * width, width, y + (long)r * width);
}

static void add_normalised(const Norm *norm, const float *y, int rows, int width, float *x, float *scratch) {
    for (int r = 0; r < rows; r++) {
        normalise(norm, y + (long)r * width, width, scratch);
        for (int i = 0; i < width; i++) x[(long)r * width + i] += scratch[i];
    }
}

INLINE vec activated(vec x, const int kind) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) {
        vec z = 0.7978845608028654f * fused(0.044715f * x * x, x, x);
        return x * (1.0f - 1.0f / (exponential(2.0f * z) + 1.0f));
    }
    if (kind == RELU) return larger(x, (vec){0});
    return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
}

/* In place: [gate and up] → the first `inner` of them. */
INLINE void activate_row(float *row, int inner, int gated, const int kind) {
    int i = 0;
    for (; i + LANES <= inner; i += LANES) {
        vec x = activated(load(row + i), kind);
        store(row + i, gated ? x * load(row + inner + i) : x);
    }
    if (i < inner) {
        size_t left = 4 * (size_t)(inner - i);
        vec x = {0}, up = spread(1.0f);
        memcpy(&x, row + i, left);
        if (gated) memcpy(&up, row + inner + i, left);
        x = activated(x, kind) * up;
        memcpy(row + i, &x, left);
    }
}

static void activate(float *x, int rows, const Model *model, float *y, int threads) {
    int inner = model->inner;
    long stride = (long)inner * (model->gated ? 2 : 1);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int r = 0; r < rows; r++) {
        float *row = x + r * stride;
        switch (model->activation) {
        case SILU: activate_row(row, inner, model->gated, SILU); break;
        case GELU_TANH: activate_row(row, inner, model->gated, GELU_TANH); break;
        case GELU: activate_row(row, inner, model->gated, GELU); break;
        default: activate_row(row, inner, model->gated, RELU); break;
        }
        if (y != x) memcpy(y + (long)r * inner, row, 4 * (size_t)inner);
    }
}

/* -- attention ------------------------------------------------------------ */

static void turn(float *restrict head, const float *restrict cos, const float *restrict sin, int rotated) {
    int half = rotated / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = fused_one(a, cos[i], -(b * sin[i]));
        head[half + i] = fused_one(b, cos[half + i], a * sin[half + i]);
    }
}

INLINE long key_at(const Model *model, int page, int head, int offset, int dim) {
    long stream = ((long)page * model->kv_heads + head) * (PAGE / LANES) + offset / LANES;
    return (stream * model->head_dim + dim) * LANES + offset % LANES;
}

INLINE int value_panels(const Model *model) { return (model->head_dim + PANEL - 1) / PANEL; }

INLINE long value_at(const Model *model, int page, int head, int dim, int offset) {
    long stream = ((long)page * model->kv_heads + head) * 2 * value_panels(model) + dim / LANES;
    return (stream * PAGE + offset) * LANES + dim % LANES;
}

/* Norms and rotation of queries and keys, and the copy of keys and values into their pages. */
static void cache_row(const Model *model, const Layer *layer, const Step *step, const Segment *segment, int i,
                      float *qkv) {
    int row = segment->start + i, dim = model->head_dim;
    float *queries = qkv, *keys = qkv + model->heads * dim, *values = keys + model->kv_heads * dim;
    int slot = segment->base + i, page = segment->table[slot / PAGE], offset = slot % PAGE;
    for (int h = 0; h < model->heads + model->kv_heads; h++) {
        float *head = qkv + h * dim;
        const Norm *norm = h < model->heads ? &layer->query : &layer->key;
        if (norm->kind) normalise(norm, head, dim, head);
        if (layer->rope >= 0)
            turn(head, step->cos[layer->rope] + (long)row * model->rotated,
                 step->sin[layer->rope] + (long)row * model->rotated, model->rotated);
    }
    for (int i = 0; i < model->heads * dim; i++) queries[i] *= layer->scale;
    for (int h = 0; h < model->kv_heads; h++) {
        float *to = layer->keys + key_at(model, page, h, offset, 0);
        for (int d = 0; d < dim; d++) to[(long)d * LANES] = keys[h * dim + d];
        for (int d = 0; d < dim; d += LANES)
            memcpy(layer->values + value_at(model, page, h, d, offset), values + h * dim + d,
                   4 * (size_t)(dim - d < LANES ? dim - d : LANES));
    }
}

/* The slots of a page that a row does not attend to. */
static void hide(const Segment *segment, int i, int window, int first, float *scores) {
    if (!segment->sees && !window) { /* a chain: all later tokens */
        for (int j = segment->base + i + 1 > first ? segment->base + i + 1 - first : 0; j < PAGE; j++)
            scores[j] = -INFINITY;
        return;
    }
    int position = segment->base + (segment->depths ? segment->depths[i] : i);
    for (int j = 0; j < PAGE; j++) {
        int slot = first + j, fresh = slot - segment->base, seen, at = slot;
        if (fresh < 0)
            seen = 1;
        else if (fresh >= segment->count)
            seen = 0;
        else if (segment->sees) {
            seen = segment->sees[i * segment->count + fresh];
            at = segment->base + segment->depths[fresh];
        } else
            seen = fresh <= i;
        if (!seen || (window && position - at >= window)) scores[j] = -INFINITY;
    }
}

INLINE int all_finite(const float *x, long count) {
    vec zeros = {0};
    for (long i = 0; i < count; i += LANES) zeros = fused(load(x + i), (vec){0}, zeros);
    for (int i = 0; i < LANES; i++)
        if (zeros[i] != 0) return 0;
    return 1;
}

/* A weight of 0 does not keep a NaN or an infinity out of a sum, so masked keys are left out. All other rows keep their
 * bits. */
static void weigh_seen(const Model *model, const Layer *layer, const Segment *segment, int kv_head, int row, int begin,
                       int end, const float *weights, float *out) {
    int panels = value_panels(model);
    memset(out, 0, 4 * (size_t)panels * PANEL);
    for (int first = begin; first < end; first += PAGE, weights += PAGE) {
        float seen[PAGE] = {0};
        if (first + PAGE > segment->base || layer->window) hide(segment, row, layer->window, first, seen);
        const float *values = layer->values + value_at(model, segment->table[first / PAGE], kv_head, 0, 0);
        for (int j = 0; j < PAGE && first + j < end; j++)
            for (int v = 0; v < panels && seen[j] == 0; v++)
                go_on_floats(1, weights, PAGE, values + v * PANEL * PAGE, PAGE, j, j + 1,
                             (Ahead){(const char *)values, 0}, out + v * PANEL, PANEL);
    }
}

/* Queries of a session that share a key head: query q belongs to row q / group. */
static void attend(const Model *model, const Layer *layer, const Segment *segment, int kv_head, int first_query,
                   int count, const float *qkv, long qkv_stride, float *attended, float *scores) {
    int dim = model->head_dim, group = model->heads / model->kv_heads, panels = value_panels(model);
    int first_row = first_query / group, last_row = (first_query + count - 1) / group;
    float *queries = scores, *out = queries + (long)MAX_ROWS * dim;
    float *peaks = out + (long)MAX_ROWS * panels * PANEL, *totals = peaks + MAX_ROWS;
    int rows[MAX_ROWS], heads[MAX_ROWS];
    scores = totals + MAX_ROWS;
    for (int q = 0; q < count; q++) {
        rows[q] = (first_query + q) / group;
        heads[q] = kv_head * group + (first_query + q) % group;
        memcpy(queries + q * dim, qkv + (segment->start + rows[q]) * qkv_stride + heads[q] * dim, 4 * (size_t)dim);
    }
    int end = segment->base + (segment->sees ? segment->count : last_row + 1), begin = 0;
    if (layer->window) {
        int lowest = segment->base + (segment->depths ? 0 : first_row) - layer->window + 1;
        begin = lowest > 0 ? lowest / PAGE * PAGE : 0;
    }
    int pages = (end - begin + PAGE - 1) / PAGE;
    long stride = (long)pages * PAGE;
    for (int q = 0; q < count; q++) peaks[q] = -INFINITY, totals[q] = 0;

    for (int p = 0; p < pages; p++) {
        int first = begin + p * PAGE, page = segment->table[first / PAGE];
        const float *keys = layer->keys + key_at(model, page, kv_head, 0, 0);
        const float *next = p + 1 < pages ? layer->keys + key_at(model, segment->table[first / PAGE + 1], kv_head, 0, 0)
                                          : layer->values + value_at(model, segment->table[begin / PAGE], kv_head, 0, 0);
        for (int part = 0; part < PAGE; part += PANEL)
            begin_floats(count, queries, dim, keys + part * dim, dim, 0, dim, (Ahead){(const char *)next, 4 * LANES},
                         scores + p * PAGE + part, stride);
        int hidden = first + PAGE > segment->base || layer->window;
        for (int q = 0; q < count; q++) {
            float *row = scores + q * stride + p * PAGE;
            if (model->softcap > 0)
                cap_scores(row, PAGE, model->softcap);
            if (hidden) hide(segment, rows[q], layer->window, first, row);
            vec peak = load(row);
            for (int j = LANES; j < PAGE; j += LANES) peak = larger(peak, load(row + j));
            for (int j = 0; j < LANES; j++)
                if (peak[j] > peaks[q]) peaks[q] = peak[j];
        }
    }
    memset(out, 0, 4 * (size_t)count * panels * PANEL);
    for (int p = 0; p < pages; p++) {
        int page = segment->table[begin / PAGE + p];
        int used = end - begin - p * PAGE < PAGE ? end - begin - p * PAGE : PAGE; /* later slots are undefined */
        float *part = scores + p * PAGE;
        for (int q = 0; q < count; q++)
            for (int j = 0; j < PAGE; j += LANES) {
                float *at = part + q * stride + j;
                store(at, exponential(load(at) - peaks[q]));
            }
        for (int j = 0; j < used; j++)
            for (int q = 0; q < count; q++) totals[q] += part[q * stride + j];
        const float *values = layer->values + value_at(model, page, kv_head, 0, 0);
        const float *next = p + 1 < pages
                                ? layer->values + value_at(model, segment->table[begin / PAGE + p + 1], kv_head, 0, 0)
                                : values;
        for (int v = 0; v < panels; v++)
            go_on_floats(count, part, stride, values + v * PANEL * PAGE, PAGE, 0, used,
                         (Ahead){(const char *)next, 4 * LANES}, out + v * PANEL, (long)panels * PANEL);
    }
    for (int q = 0; q < count; q++) {
        float *to = attended + ((long)(segment->start + rows[q]) * model->heads + heads[q]) * dim;
        if (!all_finite(out + q * panels * PANEL, (long)panels * PANEL))
            weigh_seen(model, layer, segment, kv_head, rows[q], begin, end, scores + q * stride, out + q * panels * PANEL);
        float factor = 1.0f / totals[q];
        for (int d = 0; d < dim; d++) to[d] = out[q * panels * PANEL + d] * factor;
    }
}

typedef struct {
    int segment, kv_head, first, count; /* queries */
} Task;

static int list_tasks(const Model *model, const Step *step, Task *tasks) {
    int group = model->heads / model->kv_heads, n = 0;
    int together = group < MAX_ROWS ? MAX_ROWS / group * group : MAX_ROWS;
    for (int s = 0; s < step->num_segments; s++)
        for (int first = 0; first < step->segments[s].count * group; first += together)
            for (int h = 0; h < model->kv_heads; h++) {
                int left = step->segments[s].count * group - first;
                if (tasks) tasks[n] = (Task){s, h, first, left < together ? left : together};
                n++;
            }
    return n;
}

static void attention(const Model *model, const Layer *layer, const Step *step, const Task *tasks, int num_tasks) {
    long stride = (long)(model->heads + 2 * model->kv_heads) * model->head_dim;
#pragma omp parallel num_threads(step->threads)
    {
#pragma omp for schedule(static)
        for (int row = 0; row < step->rows; row++) {
            int s = 0;
            while (row >= step->segments[s].start + step->segments[s].count) s++;
            cache_row(model, layer, step, &step->segments[s], row - step->segments[s].start,
                      step->mixed + row * stride);
        }
#pragma omp for schedule(dynamic)
        for (int t = 0; t < num_tasks; t++) {
            attend(model, layer, &step->segments[tasks[t].segment], tasks[t].kv_head, tasks[t].first, tasks[t].count,
                   step->mixed, stride, step->attended, step->scores + omp_get_thread_num() * step->scores_per_thread);
        }
    }
}

/* -- the model ------------------------------------------------------------ */

static void run_layer(const Model *model, const Layer *layer, const Step *step, const Task *tasks, int num_tasks) {
    int rows = step->rows, hidden = model->hidden, threads = step->threads;
    long mixed = (long)(model->heads + 2 * model->kv_heads) * model->head_dim;
    long inner = (long)model->inner * (model->gated ? 2 : 1);
    const float *in = step->x;
    if (layer->attention_in.kind) {
        normalise_rows(&layer->attention_in, step->x, rows, hidden, step->normed, threads);
        in = step->normed;
    }
    product(&layer->qkv, in, rows, step->mixed, mixed, 0, threads);
    if (model->parallel) { /* the feed-forward part reads the input of attention, or its own norm of it */
        if (layer->mlp_in.kind) normalise_rows(&layer->mlp_in, step->x, rows, hidden, step->normed, threads);
        product(&layer->up, step->normed, rows, step->inner, inner, 0, threads);
    }
    attention(model, layer, step, tasks, num_tasks);
    if (layer->attention_out.kind) {
        product(&layer->out, step->attended, rows, step->normed, hidden, 0, threads);
        add_normalised(&layer->attention_out, step->normed, rows, hidden, step->x, step->mixed);
    } else
        product(&layer->out, step->attended, rows, step->x, hidden, 1, threads);
    if (!model->parallel) {
        in = step->x;
        if (layer->mlp_in.kind) {
            normalise_rows(&layer->mlp_in, step->x, rows, hidden, step->normed, threads);
            in = step->normed;
        }
        product(&layer->up, in, rows, step->inner, inner, 0, threads);
    }
    float *activated = model->gated ? step->mixed : step->inner; /* packed rows: `mixed` is free again */
    activate(step->inner, rows, model, activated, threads);
    if (layer->mlp_out.kind) {
        product(&layer->down, activated, rows, step->normed, hidden, 0, threads);
        add_normalised(&layer->mlp_out, step->normed, rows, hidden, step->x, step->attended);
    } else
        product(&layer->down, activated, rows, step->x, hidden, 1, threads);
}

/* The version of the arithmetic: equal versions mean equal bits. */
int outrider_arithmetic(void) { return FUSED ? ARITHMETIC : -ARITHMETIC; }
int outrider_lanes(void) { return LANES; }
int outrider_page(void) { return PAGE; }
int outrider_most_queries(void) { return MAX_ROWS; }

int outrider_forward(const Model *model, const Step *step) {
    int num_tasks = list_tasks(model, step, NULL);
    Task *tasks = malloc(sizeof(Task) * (size_t)num_tasks);
    if (!tasks) return -1;
    list_tasks(model, step, tasks);
    for (int l = 0; l < model->num_layers; l++) run_layer(model, &model->layers[l], step, tasks, num_tasks);
    free(tasks);
    for (int w = 0; w < step->num_wanted; w++) {
        const float *from = step->x + (long)step->wanted[w] * model->hidden;
        float *to = step->hidden + (long)w * model->hidden;
        if (model->final.kind)
            normalise(&model->final, from, model->hidden, to);
        else
            memcpy(to, from, 4 * (size_t)model->hidden);
    }
    if (step->num_logits)
        product(&model->head, step->hidden, step->num_logits, step->logits, model->head.outputs, 0, step->threads);
    return 0;
}

/* Logits into (−cap, cap), in place. */
void outrider_cap(float *x, int64_t count, float cap) {
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) cap_scores(x + i, LANES, cap);
    if (whole < count) {
        float left[LANES] = {0};
        memcpy(left, x + whole, 4 * (size_t)(count - whole));
        cap_scores(left, LANES, cap);
        memcpy(x + whole, left, 4 * (size_t)(count - whole));
    }
}

/* The memory bandwidth, for `outrider bench engine`: two streams per thread, prefetched like weights. */
float outrider_read(const float *data, int64_t count, int threads) {
    float total = 0;
    int64_t share = count / threads / 2 / LANES * LANES;
#pragma omp parallel reduction(+ : total) num_threads(threads)
    {
        const float *p = data + 2 * share * omp_get_thread_num();
        vec acc[2] = {{0}};
        for (int64_t i = 0; i < share; i += LANES)
            for (int s = 0; s < 2; s++) {
                __builtin_prefetch((const char *)(p + s * share + i) + FAR, 0, 2);
                acc[s] += load(p + s * share + i);
            }
        for (int i = 0; i < LANES; i++) total += acc[0][i] + acc[1][i];
    }
    return total;
}
