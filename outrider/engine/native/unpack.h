/* Units of weights unpacked into tiles of bfloat16: a line of 32 inputs for each output, and a second tile of what the first
 * leaves. Part of tiles.c: AVX-512 with VBMI. */

#pragma once

#include "amx.h"
#include "formats.h"

/* In every 4 bytes: the upper two of `even`, then those of `odd`. One operation, where a shift and an "or" are two. */
INLINE __m512i upper_halves(__m512 even, __m512 odd) {
    return _mm512_mask_alignr_epi8((__m512i)odd, 0x3333333333333333, (__m512i)even, (__m512i)even, 2);
}

/* 32 weights, 16 with even numbers and 16 with odd ones, as two lines of bfloat16: the upper halves, and those of what they
 * leave. */
INLINE void store_parts(__m512 even, __m512 odd, char *to) {
    const __m512i halves = _mm512_set1_epi32((int)0xffff0000);
    _mm512_store_si512(to, upper_halves(even, odd));
    even -= (__m512)_mm512_and_si512((__m512i)even, halves);
    odd -= (__m512)_mm512_and_si512((__m512i)odd, halves);
    _mm512_store_si512(to + TILE, upper_halves(even, odd));
}

/* The numbers of a unit, in memory: the compiler would broadcast them from a register, on the port of the look-ups. */
INLINE void store_numbers(const int kind, const char *unit, const char *head, float *to) {
    for (int n = 0; n < FORMATS[kind].numbers; n++)
        _mm512_store_ps(to + n * UNIT, (__m512)load_numbers(kind, unit, head, n, 0));
    __asm__ volatile("" : : "r"(to) : "memory");
}

/* A line by look-up: the upper halves of a table's 16 numbers, and those of what they leave. An index has the quant in bits
 * 2 to 5 of both bytes of each 16 bits. */
INLINE void look_up(__m512i index, const float *scale, char *to) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 table = _mm512_fmadd_ps(values, _mm512_set1_ps(scale[0]), _mm512_set1_ps(scale[UNIT]));
    __m512 left = table - (__m512)_mm512_and_si512((__m512i)table, _mm512_set1_epi32((int)0xffff0000));
    index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(0x3c3c), _mm512_set1_epi16(0x0302), 0xea); /* and, or */
    _mm512_store_si512(to, _mm512_permutexvar_epi8(index, (__m512i)table));
    _mm512_store_si512(to + TILE, _mm512_permutexvar_epi8(index, (__m512i)left));
}

/* Of four inputs, each of 16 bits with the quants of four outputs: where the quant of an output starts, less 2. */
#define BITS(shift) ((shift) & 63) * 0x101l + (((shift) + 16) & 63) * 0x1010000l + \
                    (((shift) + 32) & 63) * 0x10100000000l + (((shift) + 48) & 63) * 0x101000000000000l

/* Sixteen values of each output are all that its quants can be. */
INLINE void nibbles_to_tiles(const int kind, const char *unit, const char *head, char *tiles) {
    float numbers[2 * UNIT] __attribute__((aligned(64)));
    store_numbers(kind, unit, head, numbers);
#pragma GCC unroll 4
    for (int z = 0; z < 4; z++, tiles += 4 * 64) {
        __m512i four = _mm512_loadu_si512(unit + numbers_size(kind) + 64 * z);
        look_up(_mm512_multishift_epi64_epi8(_mm512_set1_epi64(BITS(62)), four), numbers + 4 * z, tiles);
        look_up(_mm512_multishift_epi64_epi8(_mm512_set1_epi64(BITS(2)), four), numbers + 4 * z + 1, tiles + 64);
        look_up(_mm512_multishift_epi64_epi8(_mm512_set1_epi64(BITS(6)), four), numbers + 4 * z + 2, tiles + 128);
        look_up(_mm512_multishift_epi64_epi8(_mm512_set1_epi64(BITS(10)), four), numbers + 4 * z + 3, tiles + 192);
    }
}

/* One byte in four as the floats 2^15 + byte. */
INLINE __m512 floats_of(__m512i line, const int byte) {
    const __m512i base = _mm512_set1_epi32(0x47000000), places = _mm512_setr_epi32(
        0, 4 << 8, 8 << 8, 12 << 8, 0, 4 << 8, 8 << 8, 12 << 8, 0, 4 << 8, 8 << 8, 12 << 8, 0, 4 << 8, 8 << 8, 12 << 8);
    if (byte == 1) return (__m512)_mm512_mask_mov_epi8(base, 0x2222222222222222, line);
    return (__m512)_mm512_mask_shuffle_epi8(base, 0x2222222222222222, line,
                                            _mm512_add_epi8(places, _mm512_set1_epi32(byte << 8)));
}

/* Q8_0: a line has two outputs. The scale has 11 bits, so the fused operation gives scale · quant exactly. */
INLINE void pairs_to_tiles(const int kind, const char *unit, const char *head, char *tiles) {
    float numbers[2 * UNIT] __attribute__((aligned(64)));
    store_numbers(kind, unit, head, numbers);
    _mm512_store_ps(numbers + UNIT, _mm512_load_ps(numbers) * _mm512_set1_ps(-32896));
    __asm__ volatile("" : : "r"(numbers) : "memory");
#pragma GCC unroll 8
    for (int o = 0; o < UNIT; o += 2) {
        __m512i line = _mm512_loadu_si512(unit + numbers_size(kind) + BLOCK * o);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            __m512 scale = _mm512_set1_ps(numbers[o + i]), zero = _mm512_set1_ps(numbers[UNIT + o + i]);
            store_parts(_mm512_fmadd_ps(floats_of(line, 2 * i), scale, zero),
                        _mm512_fmadd_ps(floats_of(line, 2 * i + 1), scale, zero), tiles + 64 * (o + i));
        }
    }
}

/* The quants of an output, in the low bits of 32 words: four of them from the nibbles, the others from the bits above. */
INLINE __m512i words_of(const char *quants, const int output, const int more) {
    const __m512i nibbles = _mm512_loadu_si512(quants + output / 4 * 64);
    const __m512i above = _mm512_loadu_si512(quants + UNIT * BLOCK / 2 + output * more / 16 * 64);
    const int shift = output * more % 16 - 4;
    __m512i high = shift < 0 ? _mm512_slli_epi16(above, -shift) : _mm512_srli_epi16(above, shift);
    const __m512i which = _mm512_set1_epi16((short)(((1 << more) - 1) << 4));
    return _mm512_ternarylogic_epi32(_mm512_srli_epi16(nibbles, output % 4 * 4), high, which, 0xd8); /* which ? high : low */
}

/* Q5_K: a table of 32 values has the upper halves, another those of what they leave. */
INLINE void fives_to_tiles(const int kind, const char *unit, const char *head, char *tiles) {
    const __m512 values = _mm512_setr_ps(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    float numbers[2 * UNIT] __attribute__((aligned(64)));
    store_numbers(kind, unit, head, numbers);
#pragma GCC unroll 16
    for (int o = 0; o < UNIT; o++, tiles += 64) {
        __m512 scale = _mm512_set1_ps(numbers[o]), minimum = _mm512_set1_ps(numbers[UNIT + o]);
        const __m512i halves = _mm512_set1_epi32((int)0xffff0000);
        __m512 even = _mm512_fmadd_ps(values, scale, minimum), odd = _mm512_fmadd_ps(values + 1, scale, minimum);
        __m512i words = words_of(unit + numbers_size(kind), o, 1), table = upper_halves(even, odd);
        even -= (__m512)_mm512_and_si512((__m512i)even, halves);
        odd -= (__m512)_mm512_and_si512((__m512i)odd, halves);
        _mm512_store_si512(tiles, _mm512_permutexvar_epi16(words, table));
        _mm512_store_si512(tiles + TILE, _mm512_permutexvar_epi16(words, upper_halves(even, odd)));
    }
}

/* Q6_K: quants in the upper halves of floats are 128 + quant. A scale has 19 bits, so 160 times it is exact, and the fused
 * operation gives scale · (quant − 32), rounded once. The first half of the inputs has one scale, the second another. */
INLINE void sixes_to_tiles(const int kind, const char *unit, const char *head, char *tiles) {
    const __m512i quant = _mm512_set1_epi32(0x3f0000), base = _mm512_set1_epi32(0x43000000);
    float numbers[2 * UNIT] __attribute__((aligned(64))), zeros[2 * UNIT] __attribute__((aligned(64)));
    store_numbers(kind, unit, head, numbers);
    for (int n = 0; n < 2; n++) _mm512_store_ps(zeros + n * UNIT, _mm512_load_ps(numbers + n * UNIT) * _mm512_set1_ps(-160));
    __asm__ volatile("" : : "r"(zeros) : "memory");
#pragma GCC unroll 16
    for (int o = 0; o < UNIT; o++, tiles += 64) {
        __m512i odd = words_of(unit + numbers_size(kind), o, 2), even = _mm512_slli_epi32(odd, 16);
        odd = _mm512_ternarylogic_epi32(odd, quant, base, 0xea); /* and, or */
        even = _mm512_ternarylogic_epi32(even, quant, base, 0xea);
        __m512 scale = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(numbers[o]), _mm512_set1_ps(numbers[UNIT + o]));
        __m512 zero = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(zeros[o]), _mm512_set1_ps(zeros[UNIT + o]));
        store_parts(_mm512_fmadd_ps((__m512)even, scale, zero), _mm512_fmadd_ps((__m512)odd, scale, zero), tiles);
    }
}

/* int8: a line has 16 even inputs of an output, then 16 odd ones. It is bfloat16 in one part. */
INLINE void bytes_to_tiles(const char *unit, char *tiles) {
#pragma GCC unroll 4
    for (int o = 0; o < UNIT; o++, unit += BLOCK) {
        __m512 even = (__m512)from_bytes((const int8_t *)unit), odd = (__m512)from_bytes((const int8_t *)unit + 16);
        _mm512_store_si512(tiles + 64 * o, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
}

INLINE void unpack_unit(const int kind, const char *unit, const char *head, char *tiles) {
    switch (kind) {
    case INT8: bytes_to_tiles(unit, tiles); break;
    case BYTES: pairs_to_tiles(kind, unit, head, tiles); break;
    case FIVE_K: fives_to_tiles(kind, unit, head, tiles); break;
    case SIX_K: sixes_to_tiles(kind, unit, head, tiles); break;
    default: nibbles_to_tiles(kind, unit, head, tiles);
    }
}
