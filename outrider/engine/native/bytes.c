/* Products for guesses of few rows, with int8 weights that are packed for tiles.
 *
 * Tiles take as long for one row as for sixteen, longer than it takes to read the weights. Here a row is rounded to 16
 * bits, and whole numbers are added, as products in integers do. Results differ from those of tiles.c, so only drafters
 * ask for this.
 */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define DOTS 1
#endif

#include "formats.h"

#if DOTS

#define LINE 64             /* bytes: of weights, 32 inputs of two outputs; of a row, the high and the low halves of 32 inputs */
#define STEP (2 * UNIT * BLOCK) /* bytes from a unit to that of the next block */

INLINE float largest(const float *x, int count) {
    __m512 peak = _mm512_setzero_ps();
    for (int k = 0; k < count; k += 16) {
        __mmask16 mask = (__mmask16)(count - k < 16 ? (1 << (count - k)) - 1 : 0xffff);
        peak = _mm512_max_ps(peak, _mm512_abs_ps(_mm512_maskz_loadu_ps(mask, x + k)));
    }
    return _mm512_reduce_max_ps(peak);
}

/* A row as whole numbers from 0 to 65535, where 32768 is 0: lines of 32 high and 32 low bytes. Returns its scale. */
static float round_row(const float *x, int inputs, uint8_t *to) {
    float peak = largest(x, inputs);
    __m512 factor = _mm512_set1_ps(peak > 0 ? 32767 / peak : 0);
    for (int k = 0; k < inputs; k += BLOCK, to += LINE)
        for (int i = 0; i < BLOCK; i += 16) {
            int left = inputs - k - i;
            __mmask16 mask = (__mmask16)(left < 16 ? left < 0 ? 0 : (1 << left) - 1 : 0xffff);
            __m512i whole = _mm512_cvtps_epi32(_mm512_maskz_loadu_ps(mask, x + k + i) * factor);
            whole = _mm512_add_epi32(whole, _mm512_set1_epi32(32768));
            _mm_storeu_si128((__m128i *)(to + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
            _mm_storeu_si128((__m128i *)(to + BLOCK + i), _mm512_cvtepi32_epi8(whole));
        }
    return peak / 32767;
}

/* Sums over the inputs of a unit: eight lines of two outputs, and eight partial sums of each. */
INLINE void sum_lines(const char *weights, const uint8_t *row, int blocks, __m512 *sums) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i high[8], low[8], all[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) high[i] = low[i] = all[i] = _mm512_setzero_si512();
    for (int b = 0; b < blocks; b++, weights += STEP, row += LINE) {
        __m512i first = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)row));
        __m512i second = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(row + BLOCK)));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __builtin_prefetch(weights + LINE * i + 4 * STEP, 0, 3);
            __m512i line = _mm512_loadu_si512(weights + LINE * i);
            high[i] = _mm512_dpbusd_epi32(high[i], first, line);
            low[i] = _mm512_dpbusd_epi32(low[i], second, line);
            all[i] = _mm512_dpbusd_epi32(all[i], ones, line);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        high[i] = _mm512_sub_epi32(high[i], _mm512_slli_epi32(all[i], 7));
        sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[i]), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low[i]));
    }
}

/* The sums of 16 outputs in their order. */
INLINE __m512 joined_sums(const __m512 *v) {
    __m512 pairs[4];
    __m512d fours[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        pairs[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
        fours[i] = (__m512d)((__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b));
    }
    __m512 a = (__m512)fours[0], b = (__m512)fours[1];
    a = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), a);
}

/* A thread rounds the rows for itself: that is faster than to wait for the others. */
static uint8_t *own_rows(const Step *step, int blocks) {
    return (uint8_t *)step->tiles + (long)omp_get_thread_num() * OWN_ROWS * blocks * LINE;
}

/* y[rows][outputs] (+)= x[rows][inputs] · weights, for up to OWN_ROWS rows. */
void product_bytes(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    const int blocks = blocks_of(linear), units = (linear->outputs + UNIT - 1) / UNIT;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    uint8_t *whole = own_rows(step, blocks);
    float scales[OWN_ROWS];
    for (int r = 0; r < rows; r++)
        scales[r] = round_row(x + (long)r * linear->inputs, linear->inputs, whole + (long)r * blocks * LINE);
    for (int unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
        const char *weights = (const char *)linear->weights + unit / 2 * (long)blocks * STEP + unit % 2 * (STEP / 2);
        const int left = linear->outputs - unit * UNIT;
        const __mmask16 mask = (__mmask16)(left < UNIT ? (1 << left) - 1 : 0xffff);
        for (int r = 0; r < rows; r++) {
            __m512 sums[8], *to = (__m512 *)(y + r * y_stride + unit * UNIT);
            sum_lines(weights, whole + (long)r * blocks * LINE, blocks, sums);
            __m512 result = joined_sums(sums) * _mm512_set1_ps(scales[r]);
            result *= _mm512_maskz_loadu_ps(mask, linear->scales + unit * UNIT);
            if (linear->bias) result += _mm512_maskz_loadu_ps(mask, linear->bias + unit * UNIT);
            if (add) result += _mm512_maskz_loadu_ps(mask, to);
            _mm512_mask_storeu_ps(to, mask, result);
        }
    }
    meet(step);
}

#else

void product_bytes(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    (void)linear, (void)x, (void)rows, (void)y, (void)y_stride, (void)add, (void)step;
}

#endif
