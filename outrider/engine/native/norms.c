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

void normalise_rows(const Norm *norm, const float *x, int rows, int width, float *y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 4)
    for (int r = 0; r < rows; r++) normalise(norm, x + (long)r * width, width, y + (long)r * width);
}

void add_normalised(const Norm *norm, const float *y, int rows, int width, float *x, float *scratch) {
    for (int r = 0; r < rows; r++) {
        normalise(norm, y + (long)r * width, width, scratch);
        for (int i = 0; i < width; i++) x[(long)r * width + i] += scratch[i];
    }
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

/* In place: [gate and up] → the first `inner` of them. */
INLINE void activate_row(float *row, int inner, int gated, const int kind) {
    int i = 0;
    for (; i + LANES <= inner; i += LANES) {
        vec x = activated(load(row + i), kind);
        store(row + i, gated ? x * load(row + inner + i) : x);
    }
    if (i < inner) {
        size_t left = 4 * (size_t)(inner - i);
        vec x = {0}, up = spread(1.0f);
        memcpy(&x, row + i, left);
        if (gated) memcpy(&up, row + inner + i, left);
        x = activated(x, kind) * up;
        memcpy(row + i, &x, left);
    }
}

void activate(float *x, int rows, const Model *model, float *y, int threads) {
    int inner = model->inner;
    long stride = (long)inner * (model->gated ? 2 : 1);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int r = 0; r < rows; r++) {
        float *row = x + r * stride;
        switch (model->activation) {
        case SILU: activate_row(row, inner, model->gated, SILU); break;
        case GELU_TANH: activate_row(row, inner, model->gated, GELU_TANH); break;
        case GELU: activate_row(row, inner, model->gated, GELU); break;
        default: activate_row(row, inner, model->gated, RELU); break;
        }
        if (y != x) memcpy(y + (long)r * inner, row, 4 * (size_t)inner);
    }
}
