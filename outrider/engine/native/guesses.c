/* Products for guesses: few rows and int8 weights.
 *
 * Tiles take as long for one row as for sixteen, longer than it takes to read the weights. Here a row is rounded to 16
 * bits, and whole numbers are added, as products in integers do. The head goes twice, packed for tiles or not: four bits of
 * every weight find the likeliest outputs, whose logits are then computed with all bits. Results differ from those of
 * tiles.c and integers.h, so only drafters ask for this.
 */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define DOTS 1
#endif

#include "formats.h"

#if DOTS

#define LINE 64             /* bytes: of weights, 32 inputs of two outputs; of a row, the high and the low halves of 32 inputs */
#define STEP (2 * UNIT * BLOCK) /* bytes from a unit to that of the next block */
#define CANDIDATES 16       /* of the head: recalls 99.9 % of the argmaxes of the bundled drafter */
#define ROUGH (8 * UNIT / 2) /* bytes of the head's four bits: 8 inputs of 16 outputs */

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

/* Sums over the inputs of `lines` times two outputs: eight partial sums of each. */
INLINE void sum_lines(const char *weights, const uint8_t *row, int blocks, const int lines, long ahead, __m512 *sums) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i high[8], low[8], all[8];
#pragma GCC unroll 8
    for (int i = 0; i < lines; i++) high[i] = low[i] = all[i] = _mm512_setzero_si512();
    for (int b = 0; b < blocks; b++, weights += STEP, row += LINE) {
        __m512i first = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)row));
        __m512i second = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(row + BLOCK)));
#pragma GCC unroll 8
        for (int i = 0; i < lines; i++) {
            if (ahead) __builtin_prefetch(weights + LINE * i + ahead, 0, 3);
            __m512i line = _mm512_loadu_si512(weights + LINE * i);
            high[i] = _mm512_dpbusd_epi32(high[i], first, line);
            low[i] = _mm512_dpbusd_epi32(low[i], second, line);
            all[i] = _mm512_dpbusd_epi32(all[i], ones, line);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < lines; i++) {
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
            sum_lines(weights, whole + (long)r * blocks * LINE, blocks, 8, 4 * STEP, sums);
            __m512 result = joined_sums(sums) * _mm512_set1_ps(scales[r]);
            result *= _mm512_maskz_loadu_ps(mask, linear->scales + unit * UNIT);
            if (linear->bias) result += _mm512_maskz_loadu_ps(mask, linear->bias + unit * UNIT);
            if (add) result += _mm512_maskz_loadu_ps(mask, to);
            _mm512_mask_storeu_ps(to, mask, result);
        }
    }
    meet(step);
}

/* Bytes of the four bits of a head's weights; 0: it cannot have them. */
int outrider_rough_size(const Linear *head) {
    const int tiles = head->arithmetic == IN_TILES && head->kind == INT8;
    const int integers = head->arithmetic == IN_INTEGERS && head->kind == BYTES && head->scales && has_vnni();
    if (!tiles && !integers) return 0;
    return (head->outputs + UNIT - 1) / UNIT * blocks_of(head) * (BLOCK / 8) * ROUGH;
}

/* The int8 weights of an output in a block, packed for tiles or for products in integers; `place_of`: where one is in these. */
INLINE const int8_t *bytes_of(const Linear *head, long output, long block) {
    const long unit = output / UNIT, blocks = blocks_of(head);
    if (head->arithmetic == IN_TILES)
        return (const int8_t *)head->weights + (unit / 2 * blocks + block) * STEP + unit % 2 * (STEP / 2) + output % UNIT * BLOCK;
    return (const int8_t *)head->weights + unit * units_size(BYTES, blocks, 1) + unit_at(BYTES, block, 1, 0) +
           numbers_size(BYTES) + byte_at(output % UNIT, 0);
}
INLINE int place_of(const Linear *head, int input) { return head->arithmetic == IN_TILES ? input : byte_at(0, input); }

/* Fills them: [outputs / 16][inputs / 8][16][4], inputs 4 to 7 above inputs 0 to 3. */
void outrider_make_rough(const Linear *head, uint8_t *to) {
    const int eights = blocks_of(head) * 4, units = (head->outputs + UNIT - 1) / UNIT;
    for (long i = 0; i < (long)units * eights * ROUGH; i++) {
        const int eight = i / ROUGH % eights, input = eight % 4 * 8 + i % 4;
        const int8_t *bytes = bytes_of(head, i / ROUGH / eights * UNIT + i / 4 % UNIT, eight / 4);
        to[i] = (uint8_t)(((bytes[place_of(head, input)] >> 4) + 8) | ((bytes[place_of(head, input + 4)] >> 4) + 8) << 4);
    }
}

/* Rough logits of the units from `first` on, and the largest of each unit. */
static void rough_logits(const Model *model, const float *x, int first, int end, int8_t *row, float *logits, float *peaks) {
    const Linear *head = &model->head;
    const int eights = blocks_of(head) * 4;
    float peak = largest(x, head->inputs), total = 0;
    for (int k = 0; k < eights * 8; k++) {
        row[k] = (int8_t)(k < head->inputs && peak > 0 ? rintf(x[k] * (127 / peak)) : 0);
        total += row[k];
    }
    /* A weight is 16 · (its four bits − 8) and 7.5, the mean of what is below. */
    const __m512 below = _mm512_set1_ps((7.5f - 128) * total), sixteen = _mm512_set1_ps(16);
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int unit = first; unit < end; unit++) {
        const char *weights = (const char *)model->rough + (long)unit * eights * ROUGH;
        __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int k = 0; k < eights; k++, weights += ROUGH) {
            int32_t inputs[2];
            memcpy(inputs, row + 8 * k, 8);
            __builtin_prefetch(weights + 64 * ROUGH, 0, 3);
            __m512i both = _mm512_loadu_si512(weights), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            sums[0] = _mm512_dpbusd_epi32(sums[0], _mm512_and_si512(both, nibble), _mm512_set1_epi32(inputs[0]));
            sums[1] = _mm512_dpbusd_epi32(sums[1], high, _mm512_set1_epi32(inputs[1]));
        }
        const int left = head->outputs - unit * UNIT;
        const __mmask16 mask = (__mmask16)(left < UNIT ? (1 << left) - 1 : 0xffff);
        __m512 found = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sums[0], sums[1])), sixteen, below);
        found *= _mm512_maskz_loadu_ps(mask, head->scales + unit * UNIT) * _mm512_set1_ps(peak / 127);
        if (head->bias) found += _mm512_maskz_loadu_ps(mask, head->bias + unit * UNIT);
        _mm512_mask_storeu_ps(logits + unit * UNIT, mask, found);
        peaks[unit] = _mm512_mask_reduce_max_ps(mask, found);
    }
}

static int likeliest_of(const float *x, int count) {
    int best = 0;
    for (int i = 1; i < count; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* The sum over the inputs of an output in tiles, for a row as whole numbers. */
static float sum_in_tiles(const Linear *head, long output, const uint8_t *row) {
    __m512 sums;
    sum_lines((const char *)bytes_of(head, output / 2 * 2, 0), row, blocks_of(head), 1, 0, &sums);
    return _mm512_mask_reduce_add_ps(output % 2 ? 0xff00 : 0x00ff, sums);
}

static float sum_in_units(const Linear *head, long output, const float *x) {
    float sums[4] = {0};
    for (int k = 0; k < head->inputs; k += BLOCK) {
        const int8_t *bytes = bytes_of(head, output, k / BLOCK);
        for (int i = 0; i < BLOCK && k + i < head->inputs; i++) sums[i % 4] += x[k + i] * bytes[byte_at(0, i)];
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* Replaces the largest rough logits by those with all bits of the weights. */
static void refine(const Linear *head, const float *x, uint8_t *row, float *logits, float *peaks) {
    const int units = (head->outputs + UNIT - 1) / UNIT, tiles = head->arithmetic == IN_TILES;
    const float scale = tiles ? round_row(x, head->inputs, row) : 1;
    int found[CANDIDATES], count = 0;
    while (count < CANDIDATES && count < head->outputs) {
        int unit = likeliest_of(peaks, units), first = unit * UNIT;
        int outputs = head->outputs - first < UNIT ? head->outputs - first : UNIT;
        int best = first + likeliest_of(logits + first, outputs);
        if (!(logits[best] > -INFINITY)) break; /* not a number */
        found[count++] = best;
        logits[best] = -INFINITY;
        peaks[unit] = logits[first + likeliest_of(logits + first, outputs)];
    }
    for (int i = 0; i < count; i++) {
        float sum = tiles ? sum_in_tiles(head, found[i], row) : sum_in_units(head, found[i], x);
        logits[found[i]] = sum * scale * head->scales[found[i]];
        if (head->bias) logits[found[i]] += head->bias[found[i]];
    }
}

/* Logits of a step's guesses. */
void guess_logits(const Model *model, const Step *step) {
    const Linear *head = &model->head;
    const int units = (head->outputs + UNIT - 1) / UNIT, thread = omp_get_thread_num(), threads = omp_get_num_threads();
    uint8_t *row = own_rows(step, blocks_of(head));
    for (int r = 0; r < step->num_logits; r++) {
        const float *x = step->hidden + (long)r * model->hidden;
        float *logits = step->logits + (long)r * head->outputs, *peaks = step->peaks;
        rough_logits(model, x, units * thread / threads, units * (thread + 1) / threads, (int8_t *)row, logits, peaks);
        meet(step);
        if (!thread) refine(head, x, row, logits, peaks);
        meet(step);
    }
}

#else

void product_bytes(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    (void)linear, (void)x, (void)rows, (void)y, (void)y_stride, (void)add, (void)step;
}
int outrider_rough_size(const Linear *head) { return (void)head, 0; }
void outrider_make_rough(const Linear *head, uint8_t *to) { (void)head, (void)to; }
void guess_logits(const Model *model, const Step *step) { (void)model, (void)step; }

#endif
