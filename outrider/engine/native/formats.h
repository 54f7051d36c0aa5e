/* Blocks of GGUF files, repacked once and read by the products as they are.
 *
 * A unit holds 16 outputs by 32 inputs: numbers of 16 lanes (scales and minima), then the quants. Units of the same
 * outputs follow each other: [outputs / 16, inputs / 32, unit]; for tiles, two of them in turn: [outputs / 32, inputs / 32,
 * 2, unit]. A weight is scale · quant (+ minimum), rounded once, which is what dequantisation gives.
 */

#pragma once

#include "model.h"

#define UNIT 16  /* outputs */
#define BLOCK 32 /* inputs */

typedef struct {
    int bits, numbers, number_bytes, minima, sub_blocks; /* sub_blocks: scales of a block, each for its share of inputs */
} Format;

static const Format FORMATS[] = {
    [INT8] = {8, 0, 0, 0, 1},      /* in tiles only: the scales are those of the outputs */
    [NIBBLES] = {4, 2, 2, 1, 1},   /* Q4_0, Q4_1 */
    [BYTES] = {8, 1, 2, 0, 1},     /* Q8_0 */
    [NIBBLES_K] = {4, 2, 4, 1, 1}, /* Q4_K */
    [BYTES_5K] = {8, 2, 4, 1, 1},  /* Q5_K */
    [BYTES_6K] = {8, 2, 4, 0, 2},  /* Q6_K */
};

INLINE long numbers_size(const int kind) { return (long)FORMATS[kind].numbers * FORMATS[kind].number_bytes * UNIT; }
INLINE long unit_size(const int kind) { return numbers_size(kind) + UNIT * BLOCK * FORMATS[kind].bits / 8; }

/* LANES of the numbers of a unit, from output `first` on. */
INLINE vec load_numbers(const int kind, const char *unit, int which, int first) {
    long at = which * UNIT + first;
    return FORMATS[kind].number_bytes == 2 ? from_float16((const uint16_t *)unit + at) : load((const float *)unit + at);
}

/* A unit as floats of LANES outputs from `first` on: [BLOCK][LANES]. */
INLINE void dequantise(const int kind, const char *unit, int first, float *to) {
    const Format format = FORMATS[kind];
    const char *quants = unit + numbers_size(kind);
    vec scales[2], minima = {0};
    for (int s = 0; s < format.sub_blocks; s++) scales[s] = load_numbers(kind, unit, s, first);
    if (format.minima) minima = load_numbers(kind, unit, 1, first);
    for (int k = 0; k < BLOCK; k += 8) {
        ivec eight = {0};
        if (format.bits == 4) memcpy(&eight, quants + (k / 8 * UNIT + first) * 4, sizeof eight);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            vec quant = format.bits == 4 ? __builtin_convertvector(eight >> 4 * i & 15, vec)
                                         : from_bytes((const int8_t *)quants + (k + i) * UNIT + first);
            vec scale = scales[(k + i) * format.sub_blocks / BLOCK];
            store(to + (k + i) * LANES, format.minima ? fused(quant, scale, minima) : quant * scale);
        }
    }
}
