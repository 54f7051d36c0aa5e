/* Vectors of floats of the processor's own width, and functions that give the same bits for every width.
 *
 * A sum over lanes always has 16 of them (`WIDE`), in one, two or four registers, added in one order. Fused operations
 * are explicit (`fused`), not left to the compiler. The only rounding function of the C library in use is the square
 * root, which is exact everywhere.
 */

#pragma once

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
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

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
    return where(a >= spread(0.625f), far, fused(p * s, x, x)); /* of NaN as well */
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

/* bfloat16. */
INLINE vec from_halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)p, ivec) << 16);
#endif
}

/* Rounded to the nearest, to even between two. */
INLINE uint16_t to_half(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* float16. */
INLINE vec from_float16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vld1_f16((const __fp16 *)p));
#else /* shifted into place, then multiplied: also right for the smallest numbers */
    ivec wide = __builtin_convertvector(*(const halves *)p, ivec);
    vec magnitude = (vec)((wide & 0x7fff) << 13) * 0x1p112f;
    return (vec)((ivec)magnitude | (wide & 0x8000) << 16);
#endif
}
