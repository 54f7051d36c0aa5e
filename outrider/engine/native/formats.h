/* Blocks of GGUF files, repacked once and read by the products as they are.
 *
 * A unit holds 16 outputs by 32 inputs: numbers of 16 lanes (scales and minima), then the quants: four bits of each, then
 * what is above them. Units of the same outputs follow each other: [outputs / 16, inputs / 32, unit]. The numbers of a K-quant
 * are small integers times numbers of eight blocks, which are in a head before these: [outputs / 16, inputs / 256, head and
 * 8 units]. A weight is scale · quant (+ minimum), rounded once, which is what dequantisation gives.
 */

#pragma once

#include "model.h"

#define UNIT 16  /* outputs */
#define BLOCK 32 /* inputs */

typedef struct {
    int bits, numbers, minima, sub_blocks; /* sub_blocks: scales of a block, each for its share of inputs */
    int heads;                             /* numbers of a head; 0: a unit's numbers need none */
    int zero;                              /* the quant of weight 0, where it is not stored as a signed number */
} Format;

static const Format FORMATS[] = {
    [NIBBLES] = {4, 2, 1, 1, 0, 0},   /* Q4_0, Q4_1 */
    [BYTES] = {8, 1, 0, 1, 0, 0},     /* Q8_0 */
    [NIBBLES_K] = {4, 2, 1, 1, 2, 0}, /* Q4_K */
    [FIVE_K] = {5, 2, 1, 1, 2, 0},    /* Q5_K */
    [SIX_K] = {6, 2, 0, 2, 1, 32},    /* Q6_K */
};
#define HEAD_BLOCKS 8

/* A case for each of them: of a switch over kinds. */
#define KINDS(CASE) CASE(NIBBLES) CASE(BYTES) CASE(NIBBLES_K) CASE(FIVE_K) CASE(SIX_K)

INLINE long numbers_size(const int kind) { return (long)FORMATS[kind].numbers * (FORMATS[kind].heads ? 1 : 2) * UNIT; }
INLINE long unit_size(const int kind) { return numbers_size(kind) + UNIT * BLOCK * FORMATS[kind].bits / 8; }
INLINE long head_size(const int kind) { return 2l * FORMATS[kind].heads * UNIT; }

INLINE int blocks_of(const Linear *linear) { return (linear->inputs + BLOCK - 1) / BLOCK; }

/* Bytes of the units of 16 outputs, with their heads. */
INLINE long units_size(const int kind, long blocks) {
    return blocks * unit_size(kind) + (blocks + HEAD_BLOCKS - 1) / HEAD_BLOCKS * head_size(kind);
}

/* A block's unit among these, and its head. */
INLINE long unit_at(const int kind, long block) {
    return block * unit_size(kind) + (block / HEAD_BLOCKS + 1) * head_size(kind);
}
INLINE long head_at(const int kind, long block) { return units_size(kind, block / HEAD_BLOCKS * HEAD_BLOCKS); }

/* Where the quant of BYTES is in its unit. Four inputs of an output are in four bytes: 0, 1, 4 and 5 of eight, then the others. */
INLINE int byte_at(int output, int input) {
    return ((input / 8 * 2 + input % 4 / 2) * UNIT + output) * 4 + input % 8 / 4 * 2 + input % 2;
}

/* LANES of the numbers of a unit, from output `first` on. */
INLINE vec load_numbers(const int kind, const char *unit, const char *head, int which, int first) {
    if (!FORMATS[kind].heads) return from_float16((const uint16_t *)unit + which * UNIT + first);
    vec whole = from_float16((const uint16_t *)head + (FORMATS[kind].heads > 1 ? which : 0) * UNIT + first);
    return whole * from_bytes((const int8_t *)unit + which * UNIT + first);
}

/* The four low bits of `low`, and `more` bits above them from `high`. */
INLINE ivec joined(ivec low, ivec high, const int more) {
    const ivec mask = (ivec){0} + (((1 << more) - 1) << 4);
#if defined(__AVX512F__)
    return (ivec)_mm512_ternarylogic_epi32((__m512i)low, (__m512i)high, (__m512i)mask, 0xd8) & ((16 << more) - 1);
#else
    return (low & 15) | (high & mask);
#endif
}

/* A unit as floats of LANES outputs from `first` on: [BLOCK][LANES]. */
INLINE void dequantise(const int kind, const char *unit, const char *head, int first, float *to) {
    const Format format = FORMATS[kind];
    const char *quants = unit + numbers_size(kind), *above = quants + UNIT * BLOCK / 2;
    const int more = format.bits - 4; /* bits above */
    vec scales[2], minima[2] = {{0}}; /* a zero times a scale is exact */
    for (int s = 0; s < format.sub_blocks; s++) scales[s] = load_numbers(kind, unit, head, s, first);
    for (int s = 0; s < 2 && format.zero; s++) minima[s] = scales[s] * (float)-format.zero;
    if (format.minima) minima[0] = load_numbers(kind, unit, head, 1, first);
#pragma GCC unroll 4
    for (int k = 0; k < BLOCK; k += 8) {
        ivec eight[2], high = {0};
        memcpy(eight, quants + (k / 8 * (format.bits / 4) * UNIT + first) * 4, sizeof eight[0]);
        if (format.bits == 8) memcpy(eight + 1, quants + ((k / 4 + 1) * UNIT + first) * 4, sizeof eight[1]);
        else if (more) memcpy(&high, above + (k * more / 32 * UNIT + first) * 4, sizeof high);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const int from = (k / 2 + i % 4) * more % 16 + i / 4 * 16 - 4, part = (k + i) * format.sub_blocks / BLOCK;
            ivec low = eight[0] >> 4 * i, above_four = from < 0 ? high << -from : high >> from;
            ivec bits = format.bits == 4 ? low & 15 : joined(low, above_four, more);
            if (format.bits == 8) bits = eight[i % 4 / 2] << (24 - 8 * (i / 4 * 2 + i % 2)) >> 24;
            vec quant = __builtin_convertvector(bits, vec);
            int fuse = format.minima || format.zero;
            store(to + (k + i) * LANES, fuse ? fused(quant, scales[part], minima[part]) : quant * scales[part]);
        }
    }
}
