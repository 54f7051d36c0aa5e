/* AMX tiles, for the files that use them: include it first. TILES is 1 where the compiler can make them; whether the
 * processor has them is asked at run time (outrider_tiles). */

#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define TILES 1
#endif

#include "model.h"

#if TILES

#define TILE 1024 /* bytes: 16 outputs by 32 inputs, or 16 pairs of inputs by 16 rows */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

#ifdef EMULATED_TILES
#include "emulated_tiles.h"
#else
#define EMULATED 0

/* The compiler's own functions do not tell it that tiles read and write memory. */
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((long)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((long)(stride)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_DOT(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :)
#define TILE_DOT_BYTES(sum, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :)
#define TILE_DOT_UNSIGNED(sum, a, b) __asm__ volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :) /* a is unsigned */

INLINE void configure_tiles(const TileConfig *config) { __asm__ volatile("ldtilecfg %0" : : "m"(*config)); }
INLINE void release_tiles(void) { __asm__ volatile("tilerelease" : :); }
#endif

INLINE __m512 widen(__m256i halves) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }

/* Two vectors as a sum of two bfloat16 numbers each. */
INLINE void split(__m512 low, __m512 high, __m512i parts[2]) {
    parts[0] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    low -= widen(_mm512_castsi512_si256(parts[0]));
    high -= widen(_mm512_extracti64x4_epi64(parts[0], 1));
    parts[1] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

#endif
