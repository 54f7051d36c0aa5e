/* A chain from a layer that continues from its own hidden states: row after row, without a return to Python in between. */

#include "model.h"

#define REACH 8.0f /* temperatures below the peak: columns further down hardly win */
#define LARGEST ((1ull << 53) - 2)

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

/* A uniform number above 0 and below 1. */
static double uniform(const Chain *chain, uint64_t key, int column) {
    uint64_t bits = mixed(key + ((uint64_t)chain->ids[column] + 1) * 0xE7037ED1A0B428DB) >> 11;
    return ((double)(bits < LARGEST ? bits : LARGEST) + 0.5) * 0x1p-53;
}

typedef struct {
    double noise, time;
    int column;
} Runner;

/* The winner of the race that the target runs with the same noise: see outrider/speculation/noise.py. It is a guess, so
 * the functions of the C library may differ in a last bit. Of rough logits, the first ones at the end are computed with all
 * bits and run again. */
static int drawn(float *logits, const float *x, const Linear *head, const Chain *chain, uint64_t key, int rough) {
    const int count = head->outputs, places = rough ? CANDIDATES : 1, best = likeliest(logits, count);
    const float peak = logits[best], far = peak - REACH * chain->temperature, factor = 1 / chain->temperature;
    Runner first[CANDIDATES];
    double last = INFINITY; /* time of the last place */
    int found = 0, winner = 0;
    for (int start = 0; start < count; start += LANES) {
        const int some = count - start < LANES ? count - start : LANES;
        float weights[LANES], *at = logits + start;
        vec group = spread(-INFINITY);
        memcpy(&group, at, 4 * (size_t)some);
        ivec inside = group >= spread(far);
        int any = 0;
        for (int i = 0; i < LANES; i++) any |= inside[i];
        if (!any) continue;
        store(weights, exponential((group - peak) * factor));
        for (int i = 0; i < some; i++) {
            if (!inside[i]) continue;
            double number = uniform(chain, key, start + i);
            if (number >= last * weights[i]) continue; /* the noise is larger than the number */
            Runner runner = {-log1p(-number), 0, start + i};
            runner.time = runner.noise / weights[i];
            if (runner.time >= last) continue;
            int place = found < places ? found++ : found - 1;
            for (; place > 0 && runner.time < first[place - 1].time; place--) first[place] = first[place - 1];
            first[place] = runner;
            if (found == places) last = first[found - 1].time;
        }
    }
    if (!found) return best; /* not a number */
    for (int i = 0; i < found && rough; i++) {
        logits[first[i].column] = logit_of(head, x, first[i].column);
        first[i].time = log(first[i].noise) - (logits[first[i].column] - peak) * (double)factor;
        if (first[i].time < first[winner].time) winner = i;
    }
    return first[winner].column;
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
        const int rough = step->guesses && model->rough.outputs;
        chain->columns[row + count] = chain->temperature > 0
                                          ? drawn(one.logits, states, &model->head, chain, chain->keys[output], rough)
                                          : likeliest(one.logits, model->head.outputs);
    }
    return 0;
}
