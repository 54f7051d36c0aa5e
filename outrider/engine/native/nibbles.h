/* Products for guesses: four-bit weights in units of NIBBLES, times rows rounded to 8 bits by blocks.
 *
 * Rows of 8 bits take half the instructions of rows of 16. Results differ from those of integers.h, so only drafters ask for
 * this, for few rows.
 *
 * nibbles.c and nibbles_vnni.c include this file for two instruction sets.
 */

#include "rounding.h"

#define AHEAD 16384 /* prefetch distance of weights, bytes */

#if defined(__AVX2__)

#define EIGHTS (BLOCK / 8)

/* A block of a row. Of every eight inputs, 0, 2, 4 and 6, then the others: the low and the high bits of a unit's bytes. */
typedef struct {
    int32_t inputs[EIGHTS][2];
    float scale, sum; /* of the inputs */
} Block;

INLINE void round_to_bytes(const float *x, int count, Block *to) {
    int32_t whole[BLOCK] __attribute__((aligned(64)));
    to->scale = round_to(127, x, count, whole, &to->sum);
    for (int e = 0; e < EIGHTS; e++)
        for (int odd = 0; odd < 2; odd++) {
            const int32_t *from = whole + 8 * e + odd;
            to->inputs[e][odd] = (from[0] & 255) | (from[2] & 255) << 8 | (from[4] & 255) << 16 | (int32_t)((uint32_t)from[6] << 24);
        }
}

/* The sums over a block's inputs of LANES outputs. */
INLINE ivec sum_block(const char *quants, const Block *x) {
    ivec sum = {0};
#if defined(__AVX512VNNI__)
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int e = 0; e < EIGHTS; e++) {
        __m512i both = _mm512_loadu_si512(quants + e * UNIT * 4);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        sums[0] = _mm512_dpbusd_epi32(sums[0], _mm512_and_si512(both, mask), _mm512_set1_epi32(x->inputs[e][0]));
        sums[1] = _mm512_dpbusd_epi32(sums[1], high, _mm512_set1_epi32(x->inputs[e][1]));
    }
    sum = (ivec)_mm512_add_epi32(sums[0], sums[1]);
#else /* two products fit into 16 bits, and so does the sum of a block's 16: 16 · 15 · 127 */
#pragma GCC unroll 2
    for (int part = 0; part < LANES / 8; part++) {
        __m256i some = _mm256_setzero_si256();
        const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 4
        for (int e = 0; e < EIGHTS; e++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(quants + e * UNIT * 4 + part * 32));
            __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
            __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(both, mask), _mm256_set1_epi32(x->inputs[e][0]));
            some = _mm256_add_epi16(some, _mm256_add_epi16(low, _mm256_maddubs_epi16(high, _mm256_set1_epi32(x->inputs[e][1]))));
        }
        some = _mm256_madd_epi16(some, _mm256_set1_epi16(1));
        memcpy((char *)&sum + 32 * part, &some, 32);
    }
#endif
    return sum;
}

/* y[rows][outputs] (+)= x[rows][inputs] · weights, for up to OWN_ROWS rows, which a thread rounds for itself. */
void PRODUCT(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    const int blocks = blocks_of(linear), units = (linear->outputs + UNIT - 1) / UNIT;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    Block *rounded = (Block *)step->tiles + (long)thread * OWN_ROWS * blocks;
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++)
            round_to_bytes(x + (long)r * linear->inputs + b * BLOCK, linear->inputs - b * BLOCK, rounded + r * blocks + b);
    for (int unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
        const char *weights = (const char *)linear->weights + unit * units_size(NIBBLES, blocks);
        float out[UNIT];
        for (int r = 0; r < rows; r++) {
            vec sums[UNIT / LANES] = {{0}};
            for (int b = 0; b < blocks; b++) {
                const char *at = weights + b * unit_size(NIBBLES);
                const Block *block = rounded + r * blocks + b;
                for (int line = 0; line < unit_size(NIBBLES); line += 64) __builtin_prefetch(at + line + AHEAD, 0, 3);
#pragma GCC unroll 2
                for (int i = 0; i < UNIT / LANES; i++) {
                    vec scale = load_numbers(NIBBLES, at, at, 0, i * LANES), minimum = load_numbers(NIBBLES, at, at, 1, i * LANES);
                    vec exact = __builtin_convertvector(sum_block(at + numbers_size(NIBBLES) + i * LANES * 4, block), vec);
                    sums[i] = fused(exact, scale * block->scale, fused(minimum, spread(block->sum), sums[i]));
                }
            }
            for (int i = 0; i < UNIT / LANES; i++) store(out + i * LANES, sums[i]);
            finish_outputs(linear, (long)unit * UNIT, UNIT, out, y + r * y_stride + unit * UNIT, add);
        }
    }
    meet(step);
}

#else

void PRODUCT(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    product_integers(linear, x, rows, y, y_stride, add, step);
}

#endif
