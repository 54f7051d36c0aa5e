/* Attention over keys and values in pages, as floats or rounded to bfloat16. The largest score comes before the sums, and sums go key by key in order, so
 * masked keys between others change nothing (trees). */

#include "model.h"

static void turn(float *restrict head, const float *restrict cos, const float *restrict sin, int rotated) {
    int half = rotated / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec a = load(head + i), b = load(head + half + i);
        store(head + i, fused(a, load(cos + i), -(b * load(sin + i))));
        store(head + half + i, fused(b, load(cos + half + i), a * load(sin + half + i)));
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = fused_one(a, cos[i], -(b * sin[i]));
        head[half + i] = fused_one(b, cos[half + i], a * sin[half + i]);
    }
}

INLINE char *key_at(const Model *model, const Layer *layer, int page, int head, int offset) {
    long stream = ((long)page * model->num_layers * model->kv_heads + head) * (PAGE / LANES) + offset / LANES;
    return (char *)layer->keys + (stream * model->head_dim * LANES + offset % LANES) * model->cache_bytes;
}

INLINE int value_panels(const Model *model) { return (model->head_dim + PANEL - 1) / PANEL; }

INLINE char *value_at(const Model *model, const Layer *layer, int page, int head, int dim, int offset) {
    long stream = ((long)page * model->num_layers * model->kv_heads + head) * 2 * value_panels(model) + dim / LANES;
    return (char *)layer->values + ((stream * PAGE + offset) * LANES + dim % LANES) * model->cache_bytes;
}

/* `count` numbers to places that lie `step` numbers apart, LANES of them or fewer together. */
INLINE void put(const Model *model, char *to, const float *numbers, int count, long step, const int together) {
    for (int d = 0; d < count; d += together, to += step * model->cache_bytes)
        for (int i = d; i < d + together && i < count; i++) {
            if (model->cache_bytes == 4)
                ((float *)to)[i - d] = numbers[i];
            else
                ((uint16_t *)to)[i - d] = to_half(numbers[i]);
        }
}

/* Norms and rotation of the queries of a key head and of its key, and the copy of key and value into their page. */
static void cache_head(const Model *model, const Layer *layer, const Step *step, const Segment *segment, int row,
                       int kv_head, float *qkv) {
    int dim = model->head_dim, group = model->heads / model->kv_heads, slot = segment->base + row - segment->start;
    int page = segment->table[slot / PAGE], offset = slot % PAGE;
    float *queries = qkv + kv_head * group * dim, *key = qkv + (model->heads + kv_head) * dim;
    for (int h = 0; h <= group; h++) {
        float *head = h < group ? queries + h * dim : key;
        const Norm *norm = h < group ? &layer->query : &layer->key;
        if (norm->kind) normalise(norm, head, dim, head);
        if (layer->rope >= 0)
            turn(head, step->cos[layer->rope] + (long)step->positions[row] * model->rotated,
                 step->sin[layer->rope] + (long)step->positions[row] * model->rotated, model->rotated);
    }
    for (int i = 0; i < group * dim; i++) queries[i] *= layer->scale;
    if (model->tiled_cache) {
        put_in_tiles(model, layer, page, kv_head, offset, key, key + model->kv_heads * dim);
        return;
    }
    put(model, key_at(model, layer, page, kv_head, offset), key, dim, LANES, 1);
    put(model, value_at(model, layer, page, kv_head, 0, offset), key + model->kv_heads * dim, dim, PAGE * LANES, LANES);
}

/* Copies keys and values of all layers from slots to slots. All are read before any is written. */
void outrider_copy(const Model *model, const int32_t *old, const int32_t *new, int count) {
    const long bytes = model->cache_bytes, dim = model->head_dim;
    char kept[count][2][4];
    for (long at = 0; at < model->num_layers * model->kv_heads * dim; at++) {
        const Layer *layer = &model->layers[at / dim / model->kv_heads];
        int head = (int)(at / dim % model->kv_heads), d = (int)(at % dim);
        for (int i = 0; i < 2 * count; i++) {
            int slot = (i < count ? old : new)[i % count];
            char *key = key_at(model, layer, slot / PAGE, head, slot % PAGE) + d * LANES * bytes;
            char *value = value_at(model, layer, slot / PAGE, head, d, slot % PAGE);
            if (model->tiled_cache) {
                key = tiled_key(model, layer, slot / PAGE, head, slot % PAGE, d);
                value = tiled_value(model, layer, slot / PAGE, head, slot % PAGE, d);
            }
            char(*pair)[4] = kept[i % count];
            memcpy(i < count ? pair[0] : key, i < count ? key : pair[0], (size_t)bytes);
            memcpy(i < count ? pair[1] : value, i < count ? value : pair[1], (size_t)bytes);
        }
    }
}

/* The slots of a page that a row does not attend to. */
static void hide(const Segment *segment, int i, int window, int first, float *scores) {
    if (!segment->sees && !window) { /* a chain: all later tokens */
        for (int j = segment->base + i + 1 > first ? segment->base + i + 1 - first : 0; j < PAGE; j++)
            scores[j] = -INFINITY;
        return;
    }
    int position = segment->base + (segment->depths ? segment->depths[i] : i);
    for (int j = 0; j < PAGE; j++) {
        int slot = first + j, fresh = slot - segment->base, seen, at = slot;
        if (fresh < 0)
            seen = 1;
        else if (fresh >= segment->count)
            seen = 0;
        else if (segment->sees) {
            seen = segment->sees[i * segment->count + fresh];
            at = segment->base + segment->depths[fresh];
        } else
            seen = fresh <= i;
        if (!seen || (window && position - at >= window)) scores[j] = -INFINITY;
    }
}

INLINE int all_finite(const float *x, long count) {
    vec zeros = {0};
    for (long i = 0; i < count; i += LANES) zeros = fused(load(x + i), (vec){0}, zeros);
    for (int i = 0; i < LANES; i++)
        if (zeros[i] != 0) return 0;
    return 1;
}

/* A weight of 0 does not keep a NaN or an infinity out of a sum, so masked keys are left out. All other rows keep their
 * bits. */
static void weigh_seen(const Model *model, const Layer *layer, const Segment *segment, int kv_head, int row, int begin,
                       int end, const float *weights, float *out) {
    int panels = value_panels(model);
    Accumulate *go_on = model->cache_bytes == 2 ? go_on_halves : go_on_floats;
    memset(out, 0, 4 * (size_t)panels * PANEL);
    for (int first = begin; first < end; first += PAGE, weights += PAGE) {
        float seen[PAGE] = {0};
        if (first + PAGE > segment->base || layer->window) hide(segment, row, layer->window, first, seen);
        const char *values = value_at(model, layer, segment->table[first / PAGE], kv_head, 0, 0);
        for (int j = 0; j < PAGE && first + j < end; j++)
            for (int v = 0; v < panels && seen[j] == 0; v++)
                go_on(1, weights, PAGE, values + (long)v * PANEL * PAGE * model->cache_bytes, PAGE, j, j + 1,
                      (Ahead){values, 0}, out + v * PANEL, PANEL);
    }
}

/* e^(score − peak) of a page's keys, and their sum key after key; masked keys have −∞ and add 0. */
INLINE void weigh_page(const int count, float *scores, long stride, const float *peaks, int used, float *totals) {
    float sums[MAX_ROWS];
#pragma GCC unroll 12
    for (int q = 0; q < count; q++) {
        sums[q] = totals[q];
        for (int j = 0; j < PAGE; j += LANES)
            store(scores + q * stride + j, exponential(load(scores + q * stride + j) - peaks[q]));
    }
    for (int j = 0; j < used; j++)
#pragma GCC unroll 12
        for (int q = 0; q < count; q++) sums[q] += scores[q * stride + j];
    memcpy(totals, sums, 4 * (size_t)count);
}

static void weigh(int count, float *scores, long stride, const float *peaks, int used, float *totals) {
    for (int q = 0; q < count; q += 3, scores += 3 * stride, peaks += 3, totals += 3)
        switch (count - q) {
        case 1: weigh_page(1, scores, stride, peaks, used, totals); break;
        case 2: weigh_page(2, scores, stride, peaks, used, totals); break;
        default: weigh_page(3, scores, stride, peaks, used, totals);
        }
}

/* Queries of a session that share a key head: query q belongs to row q / group. */
static void attend(const Model *model, const Layer *layer, const Segment *segment, int kv_head, int first_query,
                   int count, const float *qkv, long qkv_stride, float *attended, float *scores, const char *after) {
    int dim = model->head_dim, group = model->heads / model->kv_heads, panels = value_panels(model);
    int first_row = first_query / group, last_row = (first_query + count - 1) / group;
    float *queries = scores, *out = queries + (long)MAX_ROWS * dim;
    float *peaks = out + (long)MAX_ROWS * panels * PANEL, *totals = peaks + MAX_ROWS;
    int rows[MAX_ROWS], heads[MAX_ROWS], bytes = model->cache_bytes;
    Accumulate *begin_with = bytes == 2 ? begin_halves : begin_floats, *go_on = bytes == 2 ? go_on_halves : go_on_floats;
    scores = totals + MAX_ROWS;
    for (int q = 0; q < count; q++) {
        rows[q] = (first_query + q) / group;
        heads[q] = kv_head * group + (first_query + q) % group;
        memcpy(queries + q * dim, qkv + (segment->start + rows[q]) * qkv_stride + heads[q] * dim, 4 * (size_t)dim);
    }
    int end = segment->base + (segment->sees ? segment->count : last_row + 1), begin = 0;
    if (layer->window) {
        int lowest = segment->base + (segment->depths ? 0 : first_row) - layer->window + 1;
        begin = lowest > 0 ? lowest / PAGE * PAGE : 0;
    }
    int pages = (end - begin + PAGE - 1) / PAGE;
    long stride = (long)pages * PAGE;
    vec highest[MAX_ROWS];
    for (int q = 0; q < count; q++) peaks[q] = -INFINITY, totals[q] = 0, highest[q] = spread(-INFINITY);

    for (int p = 0; p < pages; p++) {
        int first = begin + p * PAGE, page = segment->table[first / PAGE];
        const char *keys = key_at(model, layer, page, kv_head, 0);
        const char *next = p + 1 < pages ? key_at(model, layer, segment->table[first / PAGE + 1], kv_head, 0)
                                         : value_at(model, layer, segment->table[begin / PAGE], kv_head, 0, 0);
        for (int part = 0; part < PAGE; part += PANEL)
            begin_with(count, queries, dim, keys + (long)part * dim * bytes, dim, 0, dim, (Ahead){next, bytes * LANES},
                       scores + p * PAGE + part, stride);
        int hidden = first + PAGE > segment->base || layer->window;
        for (int q = 0; q < count; q++) {
            float *row = scores + q * stride + p * PAGE;
            if (model->softcap > 0)
                cap_scores(row, PAGE, model->softcap);
            if (hidden) hide(segment, rows[q], layer->window, first, row);
            for (int j = 0; j < PAGE; j += LANES) highest[q] = larger(load(row + j), highest[q]);
        }
    }
    for (int q = 0; q < count; q++)
        for (int j = 0; j < LANES; j++)
            if (highest[q][j] > peaks[q]) peaks[q] = highest[q][j];
    memset(out, 0, 4 * (size_t)count * panels * PANEL);
    for (int p = 0; p < pages; p++) {
        int page = segment->table[begin / PAGE + p];
        int used = end - begin - p * PAGE < PAGE ? end - begin - p * PAGE : PAGE; /* later slots are undefined */
        float *part = scores + p * PAGE;
        weigh(count, part, stride, peaks, used, totals);
        const char *values = value_at(model, layer, page, kv_head, 0, 0);
        const char *next = after;
        if (p + 1 < pages) next = value_at(model, layer, segment->table[begin / PAGE + p + 1], kv_head, 0, 0);
        for (int v = 0; v < panels; v++)
            go_on(count, part, stride, values + (long)v * PANEL * PAGE * bytes, PAGE, 0, used,
                  (Ahead){next + (long)v * PANEL * PAGE * bytes, bytes * LANES}, out + v * PANEL, (long)panels * PANEL);
    }
    for (int q = 0; q < count; q++) {
        float *to = attended + ((long)(segment->start + rows[q]) * model->heads + heads[q]) * dim;
        if (!all_finite(out + q * panels * PANEL, (long)panels * PANEL))
            weigh_seen(model, layer, segment, kv_head, rows[q], begin, end, scores + q * stride, out + q * panels * PANEL);
        float factor = 1.0f / totals[q];
        for (int d = 0; d < dim; d++) to[d] = out[q * panels * PANEL + d] * factor;
    }
}

/* Queries of a session are shared out evenly: a task is as few as fit in registers together. */
int list_tasks(const Model *model, const Step *step, Task *tasks) {
    int group = model->heads / model->kv_heads, n = 0, most = model->tiled_cache ? QUERIES : MAX_ROWS;
    long before = 0;
    for (int s = 0; s < step->num_segments; s++) {
        const Segment *segment = &step->segments[s];
        int queries = segment->count * group, parts = (queries + most - 1) / most;
        for (int part = 0; part < parts; part++)
            for (int h = 0; h < model->kv_heads; h++, n++) {
                if (!tasks) continue;
                int first = queries * part / parts, count = queries * (part + 1) / parts - first;
                long cost = (segment->base + (first + count) / group + PAGE) * (count + 4l); /* 4: to read a key */
                tasks[n] = (Task){s, h, first, count, before, cost};
                before += cost;
            }
    }
    return n;
}

/* A thread has tasks that follow each other, of about the same cost as the others'. */
void attention(const Model *model, const Layer *layer, const Step *step, const Task *tasks, int num_tasks) {
    long stride = (long)(model->heads + 2 * model->kv_heads) * model->head_dim;
#pragma omp for schedule(static)
    for (int i = 0; i < step->rows * model->kv_heads; i++) {
        int s = 0, row = i / model->kv_heads;
        while (row >= step->segments[s].start + step->segments[s].count) s++;
        cache_head(model, layer, step, &step->segments[s], row, i % model->kv_heads, step->mixed + row * stride);
    }
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const Task *last = &tasks[num_tasks - 1];
    for (const Task *task = tasks; task <= last; task++) {
        if ((task->before + task->cost / 2) * threads / (last->before + last->cost) != thread) continue;
        const Task *next = task < last ? task + 1 : task;
        const Segment *segment = &step->segments[task->segment], *after = &step->segments[next->segment];
        float *memory = step->scores + thread * step->scores_per_thread;
        if (model->tiled_cache)
            attend_in_tiles(model, layer, segment, task->kv_head, task->first, task->count, step->mixed, stride,
                            step->attended, memory, after, next->kv_head);
        else
            attend(model, layer, segment, task->kv_head, task->first, task->count, step->mixed, stride, step->attended,
                   memory, key_at(model, layer, after->table[0], next->kv_head, 0));
    }
#pragma omp barrier
}
