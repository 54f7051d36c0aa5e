/* Norms and activations. */

#include "model.h"

void normalise(const Norm *norm, const float *x, int width, float *y) {
    float mean = 0;
    if (norm->kind == LAYER) {
        for (int i = 0; i < width; i++) mean += x[i];
        mean /= width;
    }
    vec squares[PARTS] = {{0}};
    float rest = 0;
    int i = 0;
    for (; i + WIDE <= width; i += WIDE)
        for (int p = 0; p < PARTS; p++) {
            vec v = load(x + i + p * LANES) - mean;
            squares[p] = fused(v, v, squares[p]);
        }
    for (; i < width; i++) rest = fused_one(x[i] - mean, x[i] - mean, rest);
    float factor = 1.0f / sqrtf((sum(squares) + rest) / width + norm->eps);
    for (i = 0; i < width; i++) y[i] = (x[i] - mean) * factor * norm->weight[i];
    if (norm->bias)
        for (i = 0; i < width; i++) y[i] += norm->bias[i];
}

/* Returns rows that the calling thread may read. */
const float *normalise_rows(const Norm *norm, const float *x, const Step *step, int width) {
    if (step->rows <= OWN_ROWS) {
        float *own = step->normed + (long)omp_get_thread_num() * step->rows * width;
        for (int r = 0; r < step->rows; r++) normalise(norm, x + (long)r * width, width, own + (long)r * width);
        return own;
    }
#pragma omp for schedule(static) nowait
    for (int r = 0; r < step->rows; r++) normalise(norm, x + (long)r * width, width, step->normed + (long)r * width);
    meet(step);
    return step->normed;
}

/* Adds to x the norms of y, which it overwrites. */
void add_normalised(const Norm *norm, float *y, int width, const Step *step) {
#pragma omp for schedule(static) nowait
    for (int r = 0; r < step->rows; r++) {
        float *row = y + (long)r * width;
        normalise(norm, row, width, row);
        for (int i = 0; i < width; i++) step->x[(long)r * width + i] += row[i];
    }
    meet(step);
}

INLINE vec activated(vec x, const int kind) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) {
        vec z = 0.7978845608028654f * fused(0.044715f * x * x, x, x);
        return x * (1.0f - 1.0f / (exponential(2.0f * z) + 1.0f));
    }
    if (kind == RELU) return larger(x, (vec){0});
    return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
}

/* [count] of gate and of up, or of one input. */
INLINE void activate_values(const float *gate, const float *up, int count, const int kind, float *y) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec x = activated(load(gate + i), kind);
        store(y + i, up ? x * load(up + i) : x);
    }
    if (i < count) {
        size_t left = 4 * (size_t)(count - i);
        vec x = {0}, factor = spread(1.0f);
        memcpy(&x, gate + i, left);
        if (up) memcpy(&factor, up + i, left);
        x = activated(x, kind) * factor;
        memcpy(y + i, &x, left);
    }
}

#define SHARE 512 /* values that a thread takes at once */

/* [gate and up] of every row → packed rows of `inner`. */
void activate(float *x, const Model *model, float *y, const Step *step) {
    int inner = model->inner, shares = (inner + SHARE - 1) / SHARE;
#pragma omp for schedule(static) nowait
    for (int i = 0; i < step->rows * shares; i++) {
        int first = i % shares * SHARE, count = inner - first < SHARE ? inner - first : SHARE;
        const float *gate = x + (long)(i / shares) * inner * (model->gated ? 2 : 1) + first;
        const float *up = model->gated ? gate + inner : NULL;
        float *to = y + (long)(i / shares) * inner + first;
        switch (model->activation) {
        case SILU: activate_values(gate, up, count, SILU, to); break;
        case GELU_TANH: activate_values(gate, up, count, GELU_TANH, to); break;
        case GELU: activate_values(gate, up, count, GELU, to); break;
        default: activate_values(gate, up, count, RELU, to); break;
        }
    }
    meet(step);
}
