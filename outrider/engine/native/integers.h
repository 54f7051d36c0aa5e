/* Products in integers: quants as they are in the file, times rows rounded to 16 bits.
 *
 * Each block of 32 inputs of a row has its own scale, the block's largest number over 32767. The sum over a block is a sum
 * of integers, exact in any order, so it has the same bits on every processor. It becomes a float, times the scales of
 * weights and row, and is added block after block, then the block's minimum times the sum of its inputs. A row's bits
 * depend on nothing but the row. `product` computes with the same weights in float32 where a step asks for it.
 *
 * integers.c and integers_vnni.c include this file for two instruction sets; integers_tiles.c has the same sums for AMX.
 */

#include "quants.h"
#include "rounding.h"

#define PAIRS 16 /* of inputs in a block: inputs j and j + 4 of every eight */
#define SLICE (4 * MAX_ROWS)

/* What is in registers together: sums of so many rows and streams, and so many pairs of each stream. */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define FEW 5
#define STREAMS 2
#define AT_ONCE 1
#else
#define FEW MAX_ROWS
#define STREAMS 1
#define AT_ONCE 4
#endif

typedef int16_t words __attribute__((vector_size(4 * LANES)));

/* A block of a row. */
typedef struct {
    int32_t pairs[PAIRS];
    float scale, sum; /* of the inputs */
} Rounded;

/* sum + the products of the two 16-bit numbers in every lane and those in `pair`. */
INLINE ivec add_pair(ivec sum, ivec weights, int32_t pair) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX512BW__)
    return sum + (ivec)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    sum += (ivec)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair));
    __asm__("" : "+x"(sum)); /* the compiler would add the products of eight inputs last, and keep them in memory till then */
    return sum;
#else
    return sum + (weights << 16 >> 16) * (int16_t)pair + (weights >> 16) * (pair >> 16);
#endif
}

/* Rounds a block to the nearest integers. */
INLINE void round_block(const float *x, int count, Rounded *to) {
    int32_t whole[BLOCK] __attribute__((aligned(64)));
    typedef int32_t four __attribute__((vector_size(16)));
    to->scale = round_to(32767, x, count, whole, &to->sum);
    for (int k = 0; k < BLOCK; k += 8) {
        four pair = (*(four *)(whole + k) & 0xffff) | *(four *)(whole + k + 4) << 16;
        memcpy(to->pairs + k / 2, &pair, sizeof pair);
    }
}

/* Pair j of them. */
INLINE ivec unpack_pair(const int kind, Packed from, unsigned long k, const int j) {
    const int bits = FORMATS[kind].bits, more = bits - 4;
    if (bits == 8) return (ivec)(j % 2 ? (words)from.eight[j / 2] >> 8 : (words)((words)from.eight[j / 2] << 8) >> 8);
    ivec pair = from.eight[0] >> 4 * j & 0xf000f;
    if (more) pair |= above_four(from.high, (int)k / 2 + j, more);
    return FORMATS[kind].zero ? (ivec)((words)pair - (int16_t)FORMATS[kind].zero) : pair;
}

/* Where the units of LANES outputs are. */
typedef struct {
    const char *units;
    int first; /* of a unit's outputs */
} Stream;

INLINE Stream stream_of(const int kind, const Linear *linear, long output, int blocks) {
    return (Stream){(const char *)linear->weights + output / UNIT * units_size(kind, blocks), (int)(output % UNIT)};
}

/* Adds the products of one block to the sums of rows, [rows][STREAMS]. */
INLINE void add_block(const int kind, const int rows, const Stream *from, int block, const Rounded *x, vec *sums) {
    const Format format = FORMATS[kind];
    const char *unit[2], *head[2], *quants[2];
#pragma GCC unroll 2
    for (int i = 0; i < STREAMS; i++) {
        unit[i] = from[i].units + unit_at(kind, block), head[i] = from[i].units + head_at(kind, block);
        quants[i] = unit[i] + numbers_size(kind) + 4 * from[i].first;
        if (!i || from[i].units != from[0].units)
            for (int at = 0; at < unit_size(kind); at += 64) __builtin_prefetch(unit[i] + at + AHEAD, 0, 3);
    }
#pragma GCC unroll 2
    for (int s = 0; s < format.sub_blocks; s++) {
        const unsigned long inputs = BLOCK / format.sub_blocks;
        ivec exact[STREAMS * FEW];
#pragma GCC unroll 24
        for (int r = 0; r < rows * STREAMS; r++) exact[r] = (ivec){0};
#pragma GCC unroll 1
        for (unsigned long k = s * inputs; k < (s + 1) * inputs; k += 8) {
            Packed packed[2];
#pragma GCC unroll 2
            for (int i = 0; i < STREAMS; i++) packed[i] = load_eight(kind, quants[i], k);
#pragma GCC unroll 4
            for (int first = 0; first < 4; first += AT_ONCE) {
                ivec pairs[4];
#pragma GCC unroll 4
                for (int p = 0; p < AT_ONCE * STREAMS; p++)
                    pairs[p] = unpack_pair(kind, packed[p % STREAMS], k, first + p / STREAMS);
#pragma GCC unroll 4
                for (int j = 0; j < AT_ONCE; j++)
#pragma GCC unroll 24
                    for (int r = 0; r < rows * STREAMS; r++)
                        exact[r] = add_pair(exact[r], pairs[j * STREAMS + r % STREAMS], x[r / STREAMS].pairs[k / 2 + first + j]);
            }
        }
#pragma GCC unroll 2
        for (int i = 0; i < STREAMS; i++) {
            vec scale = load_numbers(kind, unit[i], head[i], s, from[i].first);
#pragma GCC unroll 12
            for (int r = 0, at = i; r < rows; r++, at += STREAMS)
                sums[at] = fused(__builtin_convertvector(exact[at], vec), scale * x[r].scale, sums[at]);
        }
    }
    if (!format.minima) return;
#pragma GCC unroll 2
    for (int i = 0; i < STREAMS; i++) {
        vec minimum = load_numbers(kind, unit[i], head[i], 1, from[i].first);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sums[r * STREAMS + i] = fused(minimum, spread(x[r].sum), sums[r * STREAMS + i]);
    }
}

/* Two streams of a few rows, STREAMS at a time; `together` rows have a block in turn. */
INLINE void few_rows(const int kind, const int rows, const Stream *from, const Rounded *x, int together, int blocks,
                     float *out) {
    for (int i = 0; i < 2; i += STREAMS) {
        vec sums[STREAMS * FEW];
#pragma GCC unroll 24
        for (int r = 0; r < rows * STREAMS; r++) sums[r] = (vec){0};
        for (int b = 0; b < blocks; b++) add_block(kind, rows, from + i, b, x + (long)b * together, sums);
#pragma GCC unroll 24
        for (int r = 0; r < rows * STREAMS; r++) store(out + (r / STREAMS * 2 + i + r % STREAMS) * LANES, sums[r]);
    }
}

#define ROWS(rows) \
    case rows: few_rows(kind, rows, from, x, together, blocks, out); break;
#if FEW == 12
#define MORE_ROWS ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#elif FEW == 6
#define MORE_ROWS ROWS(6)
#else
#define MORE_ROWS
#endif

INLINE void few_rows_of(const int kind, int rows, const Stream *from, const Rounded *x, int together, int blocks, float *out) {
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) MORE_ROWS }
}

/* A thread's share of some rows: outputs from `first` on, two streams at a time. */
INLINE void multiply(const int kind, const Linear *linear, const Rounded *x, int together, int rows, long first, long end,
                     float *y, long y_stride, int add) {
    const int blocks = blocks_of(linear), parts = (rows + FEW - 1) / FEW;
    float out[FEW * 2 * LANES] __attribute__((aligned(64)));
    for (long output = first; output < end; output += 2 * LANES) {
        Stream from[] = {stream_of(kind, linear, output, blocks), stream_of(kind, linear, output + LANES, blocks)};
        for (int part = 0, start = 0, some; part < parts; part++, start += some) {
            some = (rows - start) / (parts - part);
            few_rows_of(kind, some, from, x + start, together, blocks, out);
            for (int r = 0; r < some; r++)
                finish_outputs(linear, output, 2 * LANES, out + r * 2 * LANES, y + (start + r) * y_stride + output, add);
        }
    }
}

/* y[rows][outputs] (+)= x[rows][inputs] · weights. */
void PRODUCT(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    const int inputs = linear->inputs, blocks = blocks_of(linear);
    const long panels = (linear->outputs + 31) / 32, thread = omp_get_thread_num(), threads = omp_get_num_threads();
    Rounded *rounded = (Rounded *)step->tiles;
#define ROUND_ROW(r) \
    for (int b = 0; b < blocks; b++) \
        round_block(x + (long)(r) * inputs + b * BLOCK, inputs - b * BLOCK, rounded + (long)b * rows + (r))
    if (rows <= OWN_ROWS) {
        rounded += thread * OWN_ROWS * blocks;
        for (int r = 0; r < rows; r++) ROUND_ROW(r);
    } else {
#pragma omp for schedule(static) nowait
        for (int r = 0; r < rows; r++) ROUND_ROW(r);
        meet(step);
    }
    const long first = panels * thread / threads * 32, end = panels * (thread + 1) / threads * 32;
    for (int r = 0; r < rows; r += SLICE) { /* so many rows stay in the second-level cache while all weights pass */
        const int some = rows - r < SLICE ? rows - r : SLICE;
#define MULTIPLY(kind) \
    case kind: multiply(kind, linear, rounded + r, rows, some, first, end, y + r * y_stride, y_stride, add); break;
        switch (linear->kind) { KINDS(MULTIPLY) }
    }
    meet(step);
}
