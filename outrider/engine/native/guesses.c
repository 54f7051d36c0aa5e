/* Logits that are only guessed from. The head goes twice: four bits of every weight find the outputs that may win, whose
 * logits are then computed with all bits. */

#include "formats.h"

/* Whether guesses may be made from less than all bits of a head, which products for guesses do faster. */
int outrider_guesses(const Linear *head) {
#ifdef __AVX2__
    return (head->arithmetic == IN_TILES && head->kind == INT8) || (head->arithmetic == IN_INTEGERS && head->kind == BYTES);
#else
    return (void)head, 0;
#endif
}

/* The bytes of an output's weights in a block, packed for tiles or for products in integers. */
typedef struct {
    const int8_t *at;
    float scale;
} Bytes;

INLINE Bytes bytes_of(const Linear *head, long output, long block) {
    const long unit = output / UNIT, blocks = blocks_of(head);
    const float scale = head->scales ? head->scales[output] : 1;
    const char *at = head->weights;
    if (head->arithmetic == IN_TILES)
        return (Bytes){(const int8_t *)at + ((unit / 2 * blocks + block) * 2 + unit % 2) * UNIT * BLOCK + output % UNIT * BLOCK, scale};
    at += unit * units_size(BYTES, blocks, 1) + unit_at(BYTES, block, 1, 0);
    vec numbers = load_numbers(BYTES, at, at, 0, (int)(output % UNIT / LANES * LANES));
    return (Bytes){(const int8_t *)at + numbers_size(BYTES) + byte_at(output % UNIT, 0), scale * numbers[output % LANES]};
}
INLINE int place_of(const Linear *head, int input) { return head->arithmetic == IN_TILES ? input : byte_at(0, input); }

/* An output's weights in a block; returns how many there are. */
int bytes_as_floats(const Linear *head, int output, int block, float *to) {
    const Bytes from = bytes_of(head, output, block);
    const int left = head->inputs - block * BLOCK, count = left < BLOCK ? left : BLOCK;
    for (int k = 0; k < count; k++) to[k] = (float)from.at[place_of(head, k)] * from.scale;
    return count;
}

/* The logit of an output, with all bits of the weights. */
float logit_of(const Linear *head, const float *x, int output) {
    float logit = head->bias ? head->bias[output] : 0;
    for (int block = 0; block < blocks_of(head); block++, x += BLOCK) {
        float weights[BLOCK], sum = 0;
        const int count = bytes_as_floats(head, output, block, weights);
        for (int k = 0; k < count; k++) sum += x[k] * weights[k];
        logit += sum;
    }
    return logit;
}

/* The first of the largest numbers; 0 where the first one is none. */
int likeliest(const float *logits, int count) {
    float peak = logits[0];
    vec peaks = spread(peak);
    int i = 0, whole = count / LANES * LANES;
    for (; i < whole; i += LANES) peaks = larger(load(logits + i), peaks);
    for (; i < count; i++) peak = logits[i] > peak ? logits[i] : peak;
    for (i = 0; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
    for (i = 0; i < count && logits[i] != peak;) i++;
    return i < count ? i : 0;
}

/* Replaces the largest of a row's logits. */
static void refine(const Linear *head, const float *x, float *logits, float *peaks) {
    const int units = (head->outputs + UNIT - 1) / UNIT;
    int found[CANDIDATES], count = 0;
#define OUTPUTS_OF(unit) (head->outputs - (unit) * UNIT < UNIT ? head->outputs - (unit) * UNIT : UNIT)
    for (int unit = 0; unit < units; unit++)
        peaks[unit] = logits[unit * UNIT + likeliest(logits + unit * UNIT, OUTPUTS_OF(unit))];
    while (count < CANDIDATES && count < head->outputs) {
        int unit = likeliest(peaks, units), first = unit * UNIT, best = first + likeliest(logits + first, OUTPUTS_OF(unit));
        if (!(logits[best] > -INFINITY)) break; /* not a number */
        found[count++] = best;
        logits[best] = -INFINITY;
        peaks[unit] = logits[first + likeliest(logits + first, OUTPUTS_OF(unit))];
    }
    for (int i = 0; i < count; i++) logits[found[i]] = logit_of(head, x, found[i]);
}

/* Logits of the row of a chain. */
void guess_logits(const Model *model, const Step *step) {
    product(&model->rough, step->hidden, 1, step->logits, model->head.outputs, 0, step);
    if (!omp_get_thread_num()) refine(&model->head, step->hidden, step->logits, step->peaks);
    meet(step);
}
