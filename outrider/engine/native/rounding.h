/* Rows rounded to integers, by blocks of their inputs, for products in integers. */

#pragma once

#include "formats.h"

/* Rounds a block to the nearest integers from −most to most, to even between two. Returns its scale, the block's largest
 * number over `most`; a block with a number that is not finite has none. `sum`: that of the rounded inputs. */
INLINE float round_to(const float most, const float *x, int count, int32_t *whole, float *sum) {
    float block[BLOCK] __attribute__((aligned(64))) = {0};
    memcpy(block, x, 4 * (size_t)(count < BLOCK ? count : BLOCK));
    ivec largest = {0}, total = {0};
    for (int k = 0; k < BLOCK; k += LANES) {
        ivec magnitude = (ivec)load(block + k) & 0x7fffffff, which = magnitude > largest;
        largest = (magnitude & which) | (largest & ~which);
    }
    int32_t bits = 0, added = 0;
    for (int i = 0; i < LANES; i++) bits = largest[i] > bits ? largest[i] : bits;
    float peak;
    memcpy(&peak, &bits, 4);
    const float factor = peak > 1e-30f && peak < INFINITY ? most / peak : 0;
    for (int k = 0; k < BLOCK; k += LANES) {
        ivec rounded = (ivec)(load(block + k) * factor + 12582912.0f) - 0x4b400000; /* the integer is in the low bits */
        if (factor == 0) rounded = (ivec){0};
        total += rounded;
        memcpy(whole + k, &rounded, sizeof rounded);
    }
    for (int i = 0; i < LANES; i++) added += total[i];
    const float scale = peak < INFINITY ? factor == 0 ? 0 : peak / most : NAN;
    *sum = scale * (float)added;
    return scale;
}
