/* A chain from a layer that continues from its own hidden states: row after row, without a return to Python in between. */

#include "model.h"

static int likeliest(const float *logits, int count) {
    float peak = logits[0];
    vec peaks = spread(peak);
    int i = 0, whole = count / LANES * LANES;
    for (; i < whole; i += LANES) peaks = larger(load(logits + i), peaks);
    for (; i < count; i++) peak = logits[i] > peak ? logits[i] : peak;
    for (i = 0; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
    for (i = 0; i < count && logits[i] != peak;) i++;
    return i < count ? i : 0;
}

/* The rows of a step one after the other. A row's input is its token's part, plus the product of the state before it;
 * its token is the likeliest after the row before. `step` has one segment, and logits for all rows. */
int outrider_chain(Model *model, const Step *step, const Chain *chain) {
    Segment segment = step->segments[0];
    segment.count = 1;
    const float *state = chain->state;
    for (int row = 0; row < step->rows; row++, segment.base++) {
        Step one = *step;
        one.rows = one.num_wanted = one.num_logits = 1;
        one.segments = &segment;
        one.positions += row;
        one.hidden += (long)row * model->hidden;
        one.logits += (long)row * model->head.outputs;
        outrider_scratch(model, &one);
        memcpy(one.x, chain->inputs + (long)chain->columns[row] * model->hidden, 4 * (size_t)model->hidden);
#pragma omp parallel num_threads(step->threads)
        product(&chain->mix, state, 1, one.x, model->hidden, 1, &one);
        if (outrider_forward(model, &one)) return -1;
        state = one.hidden;
        chain->columns[row + 1] = likeliest(one.logits, model->head.outputs);
    }
    return 0;
}
