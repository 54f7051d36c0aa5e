/* Quants of units, eight inputs of LANES outputs at a time, for products in integers. */

#pragma once

#include "formats.h"

#define AHEAD 4096 /* prefetch distance of weights, bytes; what comes next, the processor fetches itself */

/* The bits above four of the pairs of eight inputs, in place. Pair p of the block has bit p · more of either half. */
INLINE ivec above_four(ivec high, int pair, const int more) {
    const int from = pair * more % 16 - 4;
    const ivec mask = (ivec){0} + (((1 << more) - 1) << 4) * 0x10001;
    return (from < 0 ? high << -from : high >> from) & mask;
}

/* Eight inputs of LANES outputs, as they are in the file. */
typedef struct {
    ivec eight[2], high;
} Packed;

INLINE Packed load_eight(const int kind, const char *quants, unsigned long k) {
    const int bits = FORMATS[kind].bits, more = bits - 4;
    Packed from = {{{0}}, {0}};
    memcpy(from.eight, quants + k / 8 * (bits / 4) * UNIT * 4, sizeof from.eight[0]);
    if (bits == 8) memcpy(from.eight + 1, quants + (k / 4 + 1) * UNIT * 4, sizeof from.eight[1]);
    else if (more) memcpy(&from.high, quants + UNIT * BLOCK / 2 + k * more / 32 * UNIT * 4, sizeof from.high);
    return from;
}
