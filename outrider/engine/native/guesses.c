/* Logits that are only guessed from. The head goes twice: four bits of every weight find the outputs that may win, whose
 * logits are then computed with all bits. */

#include "formats.h"

/* Whether guesses may be made from less than all bits of a head, which products for guesses do faster. */
int outrider_guesses(const Linear *head) {
#ifdef __AVX2__
    return head->arithmetic == IN_INTEGERS && head->kind == BYTES;
#else
    return (void)head, 0;
#endif
}

/* An output's weights in a block; returns how many there are. */
int bytes_as_floats(const Linear *head, int output, int block, float *to) {
    const long units = (long)(output / UNIT) * units_size(BYTES, blocks_of(head));
    const char *at = (const char *)head->weights + units + unit_at(BYTES, block);
    const int8_t *from = (const int8_t *)at + numbers_size(BYTES) + byte_at(output % UNIT, 0);
    const int left = head->inputs - block * BLOCK, count = left < BLOCK ? left : BLOCK;
    vec numbers = load_numbers(BYTES, at, at, 0, output % UNIT / LANES * LANES);
    const float scale = (head->scales ? head->scales[output] : 1) * numbers[output % LANES];
    for (int k = 0; k < count; k++) to[k] = (float)from[byte_at(0, k)] * scale;
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
