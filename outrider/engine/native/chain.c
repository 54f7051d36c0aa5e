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

/* The first rows of a step together, then the others one after the other. A row's input is its token's part, plus the
 * product of the state before it; the token of the others is the likeliest after the row before. `step` has one
 * segment, and logits for the last of the first rows and for all others. */
int outrider_chain(Model *model, const Step *step, const Chain *chain) {
    Segment segment = step->segments[0];
    const float *states = chain->states;
    int32_t last;
    Meeting meeting = NEW_MEETING;
    for (int row = 0, count = chain->given, output = 0; row < step->rows; row += count, count = 1, output++) {
        Step one = *step;
        one.rows = segment.count = count;
        one.num_wanted = one.num_logits = 1;
        one.wanted = &last;
        last = count - 1;
        one.segments = &segment;
        one.positions += row;
        one.hidden += (long)output * model->hidden;
        one.logits += (long)output * model->head.outputs;
        one.meeting = &meeting;
        outrider_scratch(model, &one);
        for (int i = 0; i < count; i++)
            memcpy(one.x + (long)i * model->hidden, chain->inputs + (long)chain->columns[row + i] * model->hidden,
                   4 * (size_t)model->hidden);
#pragma omp parallel num_threads(step->threads)
        product(&chain->mix, states, count, one.x, model->hidden, 1, &one);
        if (outrider_forward(model, &one)) return -1;
        segment.base += count;
        states = one.hidden;
        chain->columns[row + count] = likeliest(one.logits, model->head.outputs);
    }
    return 0;
}
