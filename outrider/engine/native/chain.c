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

#define NEAR 8.0f /* temperatures below the peak: columns further down hardly win */
#define LARGEST ((1ull << 53) - 2)

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

/* The winner of the race that the target runs with the same noise: see outrider/speculation/noise.py. It is a guess, so
 * the functions of the C library may differ in a last bit. */
static int drawn(const float *logits, int count, const Chain *chain, uint64_t key) {
    int winner = likeliest(logits, count);
    const float peak = logits[winner], far = peak - NEAR * chain->temperature;
    double least = INFINITY;
    for (int i = 0; i < count; i++) {
        if (!(logits[i] >= far)) continue;
        uint64_t bits = mixed(key + ((uint64_t)chain->ids[i] + 1) * 0xE7037ED1A0B428DB) >> 11;
        double noise = -log1p(-((double)(bits < LARGEST ? bits : LARGEST) + 0.5) * 0x1p-53);
        double time = log(noise) - (double)(logits[i] - peak) / chain->temperature;
        if (time < least) least = time, winner = i;
    }
    return winner;
}

/* The first rows of a step together, then the others one after the other. A row's input is its token's part, plus the
 * product of the state before it; the token of the others is the likeliest after the row before, or the one drawn there.
 * `step` has one segment, and logits for the last of the first rows and for all others. */
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
        int outputs = model->head.outputs, draws = chain->temperature > 0;
        chain->columns[row + count] = draws ? drawn(one.logits, outputs, chain, chain->keys[output]) : likeliest(one.logits, outputs);
    }
    return 0;
}
