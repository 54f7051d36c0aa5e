/* Products in integers in AMX tiles, for steps of many rows. The bits are those of integers.h.
 *
 * A row's number is 256 times a signed byte plus an unsigned one. Of a part (inputs with one scale), the products of either
 * byte with 16 outputs are a tile's exact sums. Tiles of several parts go to memory, then their sums are joined and added to
 * the rows' in order.
 */

#include "amx.h"

#include "quants.h"
#include "rounding.h"

#if TILES

#define GROUP 16   /* rows of a tile, at most */
#define SLICE 64   /* rows that share what is unpacked, and stay in the second-level cache */
#define TOGETHER 8 /* parts */

/* A block of a row: four bytes for each line of a tile of weights, see byte_at(). */
typedef struct {
    int8_t high[BLOCK], low[BLOCK];
} Halved;

typedef struct {
    float scale, sum; /* of the inputs */
} Scale;

/* The rows of a product: [blocks][rows] of both. */
typedef struct {
    Halved *blocks;
    Scale *scales;
    int count;
} Rows;

/* What is in the first-level cache together. */
typedef struct {
    int32_t products[TOGETHER][2][GROUP][UNIT];
    char unpacked[TOGETHER * BLOCK * UNIT];
    const char *weights[TOGETHER]; /* unpacked, or in place */
    float scales[TOGETHER][UNIT], minima[TOGETHER][UNIT];
    float sums[SLICE][UNIT];
} __attribute__((aligned(64))) Work;

static void round_block(const float *x, int count, Halved *to, Scale *scale) {
    const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    int32_t whole[BLOCK] __attribute__((aligned(64)));
    scale->scale = round_to(32767, x, count, whole, &scale->sum);
    for (int k = 0; k < BLOCK; k += 16) {
        __m512i numbers = _mm512_permutexvar_epi32(order, _mm512_load_si512(whole + k));
        _mm_storeu_si128((__m128i *)(to->high + k), _mm512_cvtepi32_epi8(_mm512_srai_epi32(numbers, 8)));
        _mm_storeu_si128((__m128i *)(to->low + k), _mm512_cvtepi32_epi8(numbers));
    }
}

/* Four of eight inputs: 0, 1, 4 and 5, or the others. */
INLINE ivec unpack_line(const int kind, Packed from, int k, const int line) {
    typedef int8_t line_bytes __attribute__((vector_size(64)));
    const int bits = FORMATS[kind].bits, more = bits - 4, pair = k / 2 + 2 * line;
    ivec even = line ? from.eight[0] >> 8 : from.eight[0], odd = line ? from.eight[0] >> 4 : from.eight[0] << 4;
    ivec four = (even & 0x000f000f) | (odd & 0x0f000f00);
    if (more) four |= above_four(from.high, pair, more) | above_four(from.high, pair + 1, more) << 8;
    return FORMATS[kind].zero ? (ivec)((line_bytes)four - (int8_t)FORMATS[kind].zero) : four;
}

/* The parts of one block, from part `p` on. */
INLINE void unpack(const int kind, const char *units, int block, int p, Work *work) {
    const Format format = FORMATS[kind];
    const char *unit = units + unit_at(kind, block), *head = units + head_at(kind, block);
    const char *quants = unit + numbers_size(kind);
    char *to = work->unpacked + p * (BLOCK / format.sub_blocks) * UNIT;
    for (int at = 0; at < unit_size(kind); at += 64) __builtin_prefetch(unit + at + AHEAD, 0, 3);
    for (int s = 0; s < format.sub_blocks; s++) {
        store(work->scales[p + s], load_numbers(kind, unit, head, s, 0));
        work->weights[p + s] = (format.bits == 8 ? quants : to) + s * (BLOCK / format.sub_blocks) * UNIT;
    }
    if (format.minima) store(work->minima[p], load_numbers(kind, unit, head, 1, 0));
    if (format.bits == 8) return;
#pragma GCC unroll 4
    for (int k = 0; k < BLOCK; k += 8) {
        Packed packed = load_eight(kind, quants, (unsigned long)k);
        for (int line = 0; line < 2; line++) {
            ivec four = unpack_line(kind, packed, k, line);
            memcpy(to + (k / 4 + line) * 4 * UNIT, &four, sizeof four);
        }
    }
}

/* Two tiles of sums, so that the next part need not wait until they are stored. */
#define PART(p, high_sums, low_sums, unpacked)                      \
    if (p < parts) {                                                \
        const Halved *x = rows + (long)((p) / sub_blocks) * together; \
        const long at = (p) % sub_blocks * (BLOCK / sub_blocks);    \
        TILE_ZERO(high_sums);                                       \
        TILE_ZERO(low_sums);                                        \
        TILE_LOAD(unpacked, work->weights[p], 4 * UNIT);            \
        TILE_LOAD(4, x->high + at, sizeof *x);                      \
        TILE_DOT_BYTES(high_sums, 4, unpacked);                     \
        TILE_LOAD(5, x->low + at, sizeof *x);                       \
        TILE_DOT_UNSIGNED(low_sums, 5, unpacked);                   \
        TILE_STORE(high_sums, work->products[p][0], 4 * UNIT);      \
        TILE_STORE(low_sums, work->products[p][1], 4 * UNIT);       \
    }

INLINE void multiply_parts(const Halved *rows, int together, int parts, const int sub_blocks, Work *work) {
    for (int p = 0; p < parts; p += 2) {
        PART(p, 0, 1, 6)
        PART(p + 1, 2, 3, 7)
    }
}

/* Adds the parts' products to the sums of a group of rows. */
INLINE void add_parts(const int rows, const Work *work, const Scale *x, int together, int parts, const Format format,
                      float (*sums)[UNIT]) {
    vec total[GROUP];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) total[r] = load(sums[r]);
    for (int p = 0; p < parts; p++) {
        const Scale *block = x + (long)(p / format.sub_blocks) * together;
        vec scale = load(work->scales[p]), minimum = format.minima ? load(work->minima[p]) : spread(0);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            ivec exact = (*(const ivec *)work->products[p][0][r] << 8) + *(const ivec *)work->products[p][1][r];
            total[r] = fused(__builtin_convertvector(exact, vec), scale * block[r].scale, total[r]);
            if (format.minima) total[r] = fused(minimum, spread(block[r].sum), total[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) store(sums[r], total[r]);
}

static void add(int rows, const Work *work, const Scale *x, int together, int parts, Format format, float (*sums)[UNIT]) {
#define ROWS(rows) \
    case rows: add_parts(rows, work, x, together, parts, format, sums); break;
    switch (rows) { ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14) ROWS(15) default: ROWS(16) }
}

/* The sums of one unit's outputs and some rows, in equal groups. */
INLINE void multiply_unit(const int kind, const char *units, int blocks, Rows x, int together, Work *work) {
    const Format format = FORMATS[kind];
    const int at_once = TOGETHER / format.sub_blocks, groups = (x.count + GROUP - 1) / GROUP;
    memset(work->sums, 0, sizeof *work->sums * (size_t)x.count);
    for (int b = 0; b < blocks; b += at_once) {
        const int some = blocks - b < at_once ? blocks - b : at_once, parts = some * format.sub_blocks;
        for (int i = 0; i < some; i++) unpack(kind, units, b + i, i * format.sub_blocks, work);
        for (int g = 0, r = 0, rows; g < groups; g++, r += rows) {
            const long first = (long)b * together + r;
            rows = (x.count - r + groups - g - 1) / (groups - g);
            multiply_parts(x.blocks + first, together, parts, format.sub_blocks, work);
            add(rows, work, x.scales + first, together, parts, format, work->sums + r);
        }
    }
}

/* Weights in 6 and 7, rows in 4 and 5, sums in the others. */
static void configure(int rows, int sub_blocks) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = (uint8_t)(t < 6 ? rows : BLOCK / 4 / sub_blocks);
        config.bytes[t] = (uint16_t)(t == 4 || t == 5 ? BLOCK / sub_blocks : 4 * UNIT);
    }
    configure_tiles(&config);
}

INLINE void multiply(const int kind, const Linear *linear, Rows x, int together, long first, long end, float *y,
                     long y_stride, int onto) {
    const int blocks = blocks_of(linear), groups = (x.count + GROUP - 1) / GROUP;
    Work work;
    configure((x.count + groups - 1) / groups, FORMATS[kind].sub_blocks);
    for (long output = first; output < end; output += UNIT) {
        multiply_unit(kind, (const char *)linear->weights + output / UNIT * units_size(kind, blocks), blocks, x, together, &work);
        for (int r = 0; r < x.count; r++) finish_outputs(linear, output, UNIT, work.sums[r], y + r * y_stride + output, onto);
    }
    release_tiles();
}

/* y[rows][outputs] (+)= x[rows][inputs] · weights, of FEWEST_IN_TILES rows or more. */
void product_integers_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add,
                            const Step *step) {
    const int inputs = linear->inputs, blocks = blocks_of(linear), slices = (rows + SLICE - 1) / SLICE;
    const long units = (linear->outputs + 31) / 32 * 2, thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const long first = units * thread / threads * UNIT, end = units * (thread + 1) / threads * UNIT;
    Halved *halved = (Halved *)step->tiles;
    Scale *scales = (Scale *)(halved + (long)rows * blocks);
#pragma omp for schedule(static) nowait
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) {
            const long at = (long)b * rows + r;
            round_block(x + (long)r * inputs + b * BLOCK, inputs - b * BLOCK, halved + at, scales + at);
        }
    meet(step);
    for (int s = 0, r = 0, some; s < slices; s++, r += some) {
        some = (rows - r) / (slices - s);
        const Rows part = {halved + r, scales + r, some};
#define MULTIPLY(kind) \
    case kind: multiply(kind, linear, part, rows, first, end, y + r * y_stride, y_stride, add); break;
        switch (linear->kind) { KINDS(MULTIPLY) }
    }
    meet(step);
}

#else

void product_integers_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add,
                            const Step *step) {
    (void)linear, (void)x, (void)rows, (void)y, (void)y_stride, (void)add, (void)step;
}

#endif
