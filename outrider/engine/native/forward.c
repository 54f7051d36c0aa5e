/* A decoder's forward pass on a CPU: a ragged batch of tokens (rows), keys and values in blocks (pages), packed weights.
 *
 * Every number of a row results from the same operations in the same order,
 * whatever other rows the step has. A session's logits do not depend on other
 * sessions, on how its prompt was split, or on the number of guesses:
 * - a product sums over its inputs one by one, in order (products.c);
 * - attention computes its largest score before it sums (attention.c).
 * The operations are also the same for every vector width (vectors.h).
 *
 * Plain C with GCC's vector types: AVX-512, AVX2 and NEON come from -march.
 * build.py compiles the files, and engine.py calls the functions with names of outrider_.
 */

#include "tasks.h"

#define ARITHMETIC 1 /* raise it when the bits of any result change */

/* All threads run it together. */
static void run_layer(const Model *model, const Layer *layer, const Step *step, const Task *tasks, int num_tasks) {
    int rows = step->rows, hidden = model->hidden;
    long mixed = (long)(model->heads + 2 * model->kv_heads) * model->head_dim;
    long inner = (long)model->inner * (model->gated ? 2 : 1);
    const float *in = step->x;
    if (layer->attention_in.kind) in = normalise_rows(&layer->attention_in, step->x, step, hidden);
    products(layer->qkv, in, rows, step->mixed, mixed, 0, step);
    if (model->parallel) { /* the feed-forward part reads the input of attention, or its own norm of it */
        if (layer->mlp_in.kind) in = normalise_rows(&layer->mlp_in, step->x, step, hidden);
        products(layer->up, in, rows, step->inner, inner, 0, step);
    }
    attention(model, layer, step, tasks, num_tasks);
    if (layer->attention_out.kind) {
        products(layer->out, step->attended, rows, step->normed, hidden, 0, step);
        add_normalised(&layer->attention_out, step->normed, hidden, step);
    } else
        products(layer->out, step->attended, rows, step->x, hidden, 1, step);
    if (!model->parallel) {
        in = layer->mlp_in.kind ? normalise_rows(&layer->mlp_in, step->x, step, hidden) : step->x;
        products(layer->up, in, rows, step->inner, inner, 0, step);
    }
    float *activated = model->gated ? step->mixed : step->inner; /* packed rows: `mixed` is free again */
    activate(step->inner, model, activated, step);
    if (layer->mlp_out.kind) {
        products(layer->down, activated, rows, step->normed, hidden, 0, step);
        add_normalised(&layer->mlp_out, step->normed, hidden, step);
    } else
        products(layer->down, activated, rows, step->x, hidden, 1, step);
}

/* The residual after `layer` layers, of the rows with an output. */
static void capture(const Model *model, const Step *step, int layer) {
    for (int s = 0; s < step->num_states; s++) {
        if (step->layers[s] != layer) continue;
#pragma omp for schedule(static) nowait
        for (int w = 0; w < step->num_wanted; w++)
            memcpy(step->states + ((long)w * step->num_states + s) * model->hidden,
                   step->x + (long)step->wanted[w] * model->hidden, 4 * (size_t)model->hidden);
        meet(step);
    }
}

/* The version of the arithmetic: equal versions mean equal bits. */
int outrider_arithmetic(void) { return FUSED ? ARITHMETIC : -ARITHMETIC; }
int outrider_lanes(void) { return LANES; }
int outrider_page(void) { return PAGE; }

static long larger_of(long a, long b) { return a > b ? a : b; }

/* Lays out the scratch memory of a step, and returns how many numbers it has. */
int64_t outrider_scratch(const Model *model, Step *step) {
    long rows = step->rows, longest = 0, at = 0, heads = (long)model->heads * model->head_dim;
    long mixed = heads + 2l * model->kv_heads * model->head_dim, inner = (long)model->inner * (model->gated ? 2 : 1);
    int widest = (int)larger_of(larger_of(model->hidden, heads), model->inner);
    for (int s = 0; s < step->num_segments; s++)
        longest = larger_of(longest, step->segments[s].base + step->segments[s].count + PAGE);
    /* of attention: queries, sums, peaks and totals, and scores of whole pages */
    step->scores_per_thread = (MAX_ROWS * (longest + 2l * model->head_dim + PANEL + 2) + 63) / 64 * 64;
    if (model->tiled_cache) step->scores_per_thread = tiled_scratch(model, longest);
    /* Few rows are prepared by every thread for itself, and a chain lays it out again for fewer rows. */
    long prepared = larger_of(rows, step->threads * (rows < OWN_ROWS ? rows : OWN_ROWS));
    struct {
        float **part;
        long size;
    } parts[] = {{&step->normed, prepared * model->hidden},
                 {&step->mixed, rows * larger_of(larger_of(mixed, model->inner), model->hidden)},
                 {&step->inner, rows * inner},
                 {&step->attended, rows * larger_of(heads, model->hidden)},
                 {&step->scores, step->threads * step->scores_per_thread},
                 {&step->tiles, larger_of(tiles_scratch(widest, step->rows, step->threads),
                                              integers_scratch(widest, step->rows, step->threads)) / 4},
                 {&step->peaks, model->head.outputs / 16 + 1}};
    for (int i = 0; i < (int)(sizeof parts / sizeof *parts); i++) {
        *parts[i].part = step->scratch + at;
        at += (parts[i].size + 15) / 16 * 16;
    }
    return at;
}

int outrider_forward(Model *model, Step *step) {
    outrider_scratch(model, step);
    Pace *pace = pace_of(model, step->rows);
    int num_tasks, threads = pace ? outrider_pace_threads(pace, step->threads) : step->threads;
    double began = omp_get_wtime();
    Task *tasks = list_tasks(model, step, &num_tasks);
    if (!tasks) return -1;
    Meeting meeting = NEW_MEETING;
    step->meeting = &meeting;
#pragma omp parallel num_threads(threads)
    {
        for (int l = 0; l < model->num_layers; l++) {
            run_layer(model, &model->layers[l], step, tasks, num_tasks);
            capture(model, step, l + 1);
        }
#pragma omp for schedule(static) nowait
        for (int w = 0; w < step->num_wanted; w++) {
            const float *from = step->x + (long)step->wanted[w] * model->hidden;
            float *to = step->hidden + (long)w * model->hidden;
            if (model->final.kind)
                normalise(&model->final, from, model->hidden, to);
            else
                memcpy(to, from, 4 * (size_t)model->hidden);
        }
        meet(step);
        if (step->num_logits && step->guesses && model->rough.outputs)
            guess_logits(model, step);
        else if (step->num_logits)
            product(&model->head, step->hidden, step->num_logits, step->logits, model->head.outputs, 0, step);
    }
    free(tasks);
    if (pace) outrider_pace_record(pace, step->threads, (float)(omp_get_wtime() - began));
    return 0;
}

/* Logits into (−cap, cap), in place. */
void outrider_cap(float *x, int64_t count, float cap) {
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) cap_scores(x + i, LANES, cap);
    if (whole < count) {
        float left[LANES] = {0};
        memcpy(left, x + whole, 4 * (size_t)(count - whole));
        cap_scores(left, LANES, cap);
        memcpy(x + whole, left, 4 * (size_t)(count - whole));
    }
}

/* The memory bandwidth, for `outrider bench engine`: two streams per thread, prefetched like weights. */
float outrider_read(const float *data, int64_t count, int threads) {
    float total = 0;
    int64_t share = count / threads / 2 / LANES * LANES;
#pragma omp parallel reduction(+ : total) num_threads(threads)
    {
        const float *p = data + 2 * share * omp_get_thread_num();
        vec acc[2] = {{0}};
        for (int64_t i = 0; i < share; i += LANES)
            for (int s = 0; s < 2; s++) {
                __builtin_prefetch((const char *)(p + s * share + i) + FAR, 0, 2);
                acc[s] += load(p + s * share + i);
            }
        for (int i = 0; i < LANES; i++) total += acc[0][i] + acc[1][i];
    }
    return total;
}
