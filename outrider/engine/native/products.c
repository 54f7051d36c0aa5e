/* Products of rows with packed weights. Every output is a sum over the inputs one by one, in order: a row's bits depend on
 * nothing but the row. */

#include "formats.h"

#define TURN 64 /* inputs that one block of rows processes before the next block */
#define SLICE (8 * MAX_ROWS)

/* out[rows][PANEL] (+)= x[rows][first to end] · panel, one input after the other. `far`: the panel is in memory, and its
 * numbers have so many bytes. */
INLINE void accumulate(const int far, const int rows, const float *x, long x_stride, const void *panel, int inputs,
                       int first, int end, Ahead ahead, float *out, long out_stride, const int onto) {
    const int bytes = far ? far : 4;
    vec acc[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) acc[r][i] = onto ? load(out + r * out_stride + i * LANES) : (vec){0};
    for (int k = first; k < end; k++, ahead.at += ahead.step) {
        vec w[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const char *at = (const char *)panel + ((long)i * inputs + k) * LANES * bytes;
            if (far && k * LANES * bytes % 64 == 0) { /* a cache line begins */
                __builtin_prefetch(at + NEAR, 0, 3);
                __builtin_prefetch(ahead.at + (long)i * inputs * LANES * bytes, 0, 2);
            }
            w[i] = bytes == 2 ? from_halves((const uint16_t *)at) : load((const float *)at);
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
#define CASE(far, rows, ...) \
    case rows: accumulate(far, rows, __VA_ARGS__); break;
#define FEW_ROWS(far, ...)                                                                      \
    CASE(far, 1, __VA_ARGS__) CASE(far, 2, __VA_ARGS__) CASE(far, 3, __VA_ARGS__)               \
    CASE(far, 4, __VA_ARGS__) CASE(far, 5, __VA_ARGS__) CASE(far, 6, __VA_ARGS__)
#if MAX_ROWS == 12
#define ALL_ROWS(far, ...)                                                                      \
    FEW_ROWS(far, __VA_ARGS__)                                                                  \
    CASE(far, 7, __VA_ARGS__) CASE(far, 8, __VA_ARGS__) CASE(far, 9, __VA_ARGS__)               \
    CASE(far, 10, __VA_ARGS__) CASE(far, 11, __VA_ARGS__) CASE(far, 12, __VA_ARGS__)
#else
#define ALL_ROWS FEW_ROWS
#endif

#define ACCUMULATE(name, far, onto)                                                                            \
    void name(int rows, const float *x, long x_stride, const void *panel, int inputs, int first, int end,     \
              Ahead ahead, float *out, long out_stride) {                                                      \
        switch (rows) { ALL_ROWS(far, x, x_stride, panel, inputs, first, end, ahead, out, out_stride, onto) }  \
    }
ACCUMULATE(begin_floats, 4, 0)
ACCUMULATE(go_on_floats, 4, 1)
ACCUMULATE(begin_halves, 2, 0)
ACCUMULATE(go_on_halves, 2, 1)
static ACCUMULATE(begin_unpacked, 0, 0)
static ACCUMULATE(go_on_unpacked, 0, 1)

/* `count` inputs of one stream of LANES outputs as floats: [count][LANES]. */
static void unpack_halves(const Linear *linear, int stream, int first, int count, float *to) {
    const uint16_t *from = (const uint16_t *)linear->weights + ((long)stream * linear->inputs + first) * LANES;
    for (int k = 0; k < count; k++, from += LANES) {
        if (k * LANES * 2 % 64 == 0) {
            __builtin_prefetch((const char *)from + NEAR, 0, 3);
            __builtin_prefetch((const char *)from + FAR, 0, 2);
        }
        store(to + k * LANES, from_halves(from));
    }
}

INLINE void unpack_blocks(const int kind, const Linear *linear, int stream, int first, int count, float *to) {
    const char *units = (const char *)linear->weights +
                        stream * LANES / UNIT * units_size(kind, blocks_of(linear));
    for (int k = 0; k < count; k += BLOCK) {
        long block = (first + k) / BLOCK;
        const char *unit = units + unit_at(kind, block), *head = units + head_at(kind, block);
        for (int at = 0; at < unit_size(kind); at += 64) {
            __builtin_prefetch(unit + at + NEAR, 0, 3);
            __builtin_prefetch(unit + at + FAR, 0, 2);
        }
        dequantise(kind, unit, head, stream * LANES % UNIT, to + k * LANES);
    }
}

static void unpack(const Linear *linear, int stream, int first, int count, float *to) {
#define UNPACK(kind) \
    case kind: unpack_blocks(kind, linear, stream, first, count, to); break;
    switch (linear->kind) { KINDS(UNPACK) default: unpack_halves(linear, stream, first, count, to); }
}

/* More rows than fit in registers are processed in turns; each block of rows prefetches a share of the next turn's
 * weights. */
static void multiply_floats(const Linear *linear, int panel, const float *x, int rows, float *out) {
    int inputs = linear->inputs, blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const float *weights = (const float *)linear->weights + (long)panel * PANEL * inputs;
    int turn = blocks > 1 && blocks <= 4 ? TURN : inputs;
    for (int k = 0; k < inputs; k += turn) {
        const float *next = weights + (k + turn < inputs ? (long)(k + turn) : 2l * inputs) * LANES;
        for (int b = 0, r = 0; b < blocks; b++) {
            int count = (rows - r) / (blocks - b);
            Ahead ahead = {(const char *)weights + FAR, 4 * LANES};
            if (blocks > 1) ahead = (Ahead){(const char *)(next + (long)b * turn * LANES / blocks), 4 * LANES / blocks};
            (k ? go_on_floats : begin_floats)(count, x + (long)r * inputs, inputs, weights, inputs, k,
                                              k + turn < inputs ? k + turn : inputs, ahead, out + r * PANEL, PANEL);
            r += count;
        }
    }
}

/* Unpacks a turn of inputs once for all rows. */
static void multiply_unpacked(const Linear *linear, int panel, const float *x, int rows, float *out) {
    float floats[2 * TURN * LANES] __attribute__((aligned(64)));
    int inputs = linear->inputs;
    for (int k = 0; k < inputs; k += TURN) {
        int count = inputs - k < TURN ? inputs - k : TURN;
        for (int i = 0; i < 2; i++) unpack(linear, 2 * panel + i, k, count, floats + i * TURN * LANES);
        for (int r = 0, more; r < rows; r += more) {
            more = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
            (k ? go_on_unpacked : begin_unpacked)(more, x + (long)r * inputs + k, inputs, floats, TURN, 0, count,
                                                  (Ahead){0}, out + r * PANEL, PANEL);
        }
    }
}

/* `width` sums of one row, of the outputs from `first` on, into `to`. */
void finish_outputs(const Linear *linear, long first, int width, float *from, float *to, int add) {
    long outputs = linear->outputs - first < width ? linear->outputs - first : width;
    if (linear->scales)
        for (int i = 0; i < outputs; i++) from[i] *= linear->scales[first + i];
    if (linear->bias)
        for (int i = 0; i < outputs; i++) from[i] += linear->bias[first + i];
    if (outputs < width)
        for (int i = 0; i < outputs; i++) to[i] = add ? to[i] + from[i] : from[i];
    else
        for (int i = 0; i < width; i += LANES) store(to + i, add ? load(to + i) + load(from + i) : load(from + i));
}

static void product_panel(const Linear *linear, int panel, const float *x, int rows, float *out, float *y,
                          long y_stride, int add) {
    int first = panel * PANEL;
    (linear->kind == FLOAT32 ? multiply_floats : multiply_unpacked)(linear, panel, x, rows, out);
    for (int r = 0; r < rows; r++) finish_outputs(linear, first, PANEL, out + r * PANEL, y + r * y_stride + first, add);
}

/* y[rows][outputs] (+)= x[rows][inputs] · weights. */
void product(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    if (linear->arithmetic == IN_INTEGERS && !step->exact) {
        const int vnni = has_vnni();
        if (step->guesses && linear->kind == NIBBLES && rows <= OWN_ROWS)
            (vnni ? product_nibbles_vnni : product_nibbles)(linear, x, rows, y, y_stride, add, step);
        else if (rows >= FEWEST_IN_TILES && has_tiles())
            product_integers_tiles(linear, x, rows, y, y_stride, add, step);
        else
            (vnni ? product_integers_vnni : product_integers)(linear, x, rows, y, y_stride, add, step);
        return;
    }
    if (linear->arithmetic == IN_TILES) {
        product_tiles(linear, x, rows, y, y_stride, add, step);
        return;
    }
    int panels = (linear->outputs + PANEL - 1) / PANEL;
#pragma omp for schedule(static) nowait
    for (int panel = 0; panel < panels; panel++) {
        float out[SLICE * PANEL];
        for (int r = 0; r < rows; r += SLICE)
            product_panel(linear, panel, x + (long)r * linear->inputs, rows - r < SLICE ? rows - r : SLICE, out,
                          y + r * y_stride, y_stride, add);
    }
    meet(step);
}

void products(const Linear parts[3], const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    for (int i = 0; i < 3 && parts[i].outputs; y += parts[i++].outputs) product(&parts[i], x, rows, y, y_stride, add, step);
}
