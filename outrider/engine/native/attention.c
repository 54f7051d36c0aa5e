/* Attention over keys and values in pages, as floats or rounded to bfloat16. The largest score comes before the sums, and
 * sums go key by key in order, so masked keys between others change nothing (trees). */

#include "tasks.h"

#define PAGES_AHEAD 4 /* prefetch distance: memory answers later than a page of few queries takes */

static int smaller(int a, int b) { return a < b ? a : b; }

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

/* Several queries together: the sum of one waits for each of its additions. */
static void weigh(int count, float *scores, long stride, const float *peaks, int used, float *totals) {
    for (int few; count; count -= few, scores += few * stride, peaks += few, totals += few) {
        few = count >= 6 ? 6 : count >= 3 ? 3 : count;
        switch (few) {
        case 1: weigh_page(1, scores, stride, peaks, used, totals); break;
        case 2: weigh_page(2, scores, stride, peaks, used, totals); break;
        case 3: weigh_page(3, scores, stride, peaks, used, totals); break;
        default: weigh_page(6, scores, stride, peaks, used, totals);
        }
    }
}

typedef struct {
    const Segment *segment;
    int row, head;
} Query;

/* Queries of one segment, and the slots that they see: those of its own pages. */
typedef struct {
    int first, count, own, end;
} Part;

/* What a task computes with. Memory is of the thread; scores are from slot `begin` on. */
typedef struct {
    const Model *model;
    const Layer *layer;
    int kv_head, begin;
    long stride; /* of the scores of a query */
    Query queries[MAX_ROWS];
    vec highest[MAX_ROWS];
    float *rows, *out, *peaks, *totals, *scores;
} Work;

/* Scores of pages, and the highest ones. Their values are read after them. */
static void score_pages(Work *work, const Part *part, int from, int end) {
    const Model *model = work->model;
    const Segment *segment = work->queries[part->first].segment;
    const int dim = model->head_dim, bytes = model->cache_bytes, window = work->layer->window;
    const int *values = &segment->table[work->begin / PAGE];
    Accumulate *begin_with = bytes == 2 ? begin_halves : begin_floats;
    for (int first = from; first < end; first += PAGE) {
        const int *page = &segment->table[first / PAGE];
        const char *keys = key_at(model, work->layer, *page, work->kv_head, 0);
        const int ahead = first + PAGES_AHEAD * PAGE, later = smaller(ahead - end, end - 1 - work->begin) / PAGE;
        const char *next = ahead < end ? key_at(model, work->layer, page[PAGES_AHEAD], work->kv_head, 0)
                                       : value_at(model, work->layer, values[later], work->kv_head, 0, 0);
        float *scores = work->scores + part->first * work->stride + first - work->begin;
        for (int panel = 0; panel < PAGE; panel += PANEL)
            begin_with(part->count, work->rows + part->first * dim, dim, keys + (long)panel * dim * bytes, dim, 0, dim,
                       (Ahead){next, bytes * LANES}, scores + panel, work->stride);
        for (int q = part->first; q < part->first + part->count; q++, scores += work->stride) {
            const Query *query = &work->queries[q];
            if (model->softcap > 0) cap_scores(scores, PAGE, model->softcap);
            if (first + PAGE > segment->base || window) hide(query->segment, query->row, window, first, scores);
            for (int j = 0; j < PAGE; j += LANES) work->highest[q] = larger(load(scores + j), work->highest[q]);
        }
    }
}

/* Adds the values of pages to the sums, by their weights. `then` is read after them. */
static void add_pages(const Work *work, const Part *part, int from, int end, const char *then) {
    const Model *model = work->model;
    const Segment *segment = work->queries[part->first].segment;
    const int panels = value_panels(model), bytes = model->cache_bytes;
    const long width = (long)panels * PANEL, panel = (long)PANEL * PAGE * bytes;
    Accumulate *go_on = bytes == 2 ? go_on_halves : go_on_floats;
    for (int first = from; first < end; first += PAGE) {
        const int *page = &segment->table[first / PAGE];
        const int used = end - first < PAGE ? end - first : PAGE; /* later slots are undefined */
        float *weights = work->scores + part->first * work->stride + first - work->begin;
        weigh(part->count, weights, work->stride, work->peaks + part->first, used, work->totals + part->first);
        const char *values = value_at(model, work->layer, *page, work->kv_head, 0, 0);
        const int near = first + PAGES_AHEAD * PAGE < end;
        const char *next = near ? value_at(model, work->layer, page[PAGES_AHEAD], work->kv_head, 0, 0) : then;
        for (int v = 0; v < panels; v++)
            go_on(part->count, weights, work->stride, values + v * panel, PAGE, 0, used,
                  (Ahead){next + v * panel, bytes * LANES}, work->out + part->first * width + v * PANEL, width);
    }
}

/* Divides by the totals. Sums that are no numbers are computed again, without the keys that a row does not see. */
static void finish(const Work *work, const Part *part, float *attended) {
    const Model *model = work->model;
    const long width = (long)value_panels(model) * PANEL;
    for (int q = part->first; q < part->first + part->count; q++) {
        const Query *query = &work->queries[q];
        float *out = work->out + q * width;
        if (!all_finite(out, width))
            weigh_seen(model, work->layer, query->segment, work->kv_head, query->row, work->begin, part->end,
                       work->scores + q * work->stride, out);
        float factor = 1.0f / work->totals[q];
        float *to = attended + ((long)(query->segment->start + query->row) * model->heads + query->head) * model->head_dim;
        for (int d = 0; d < model->head_dim; d++) to[d] = out[d] * factor;
    }
}

/* Lists the queries of a task that are of one segment: query q of it belongs to row q / group. */
static Part list_queries(Work *work, const Task *task, const Segment *segment, int next, const float *qkv, long stride) {
    const int dim = work->model->head_dim, group = work->model->heads / work->model->kv_heads;
    const int left = segment->count * group - task->first, count = task->count - next < left ? task->count - next : left;
    for (int q = 0; q < count; q++) {
        Query query = {segment, (task->first + q) / group, task->kv_head * group + (task->first + q) % group};
        work->queries[next + q] = query;
        memcpy(work->rows + (next + q) * dim, qkv + (segment->start + query.row) * stride + query.head * dim,
               4 * (size_t)dim);
    }
    int first_row = task->first / group, last_row = (task->first + count - 1) / group;
    int lowest = segment->base + (segment->depths ? 0 : first_row) - work->layer->window + 1;
    lowest = work->layer->window && lowest > 0 ? lowest / PAGE * PAGE : 0;
    if (!next || lowest < work->begin) work->begin = lowest;
    return (Part){next, count, task->shared * PAGE, segment->base + (segment->sees ? segment->count : last_row + 1)};
}

static void attend(const Model *model, const Layer *layer, const Task *task, const float *qkv, long qkv_stride,
                   float *attended, float *memory, const char *after) {
    const long width = (long)value_panels(model) * PANEL;
    const int count = task->count, shared = task->shared * PAGE;
    Work work = {.model = model, .layer = layer, .kv_head = task->kv_head, .rows = memory};
    Part parts[QUERIES], *end = parts, all = {0, count, 0, shared};
    work.out = work.rows + (long)MAX_ROWS * model->head_dim;
    work.peaks = work.out + MAX_ROWS * width, work.totals = work.peaks + MAX_ROWS, work.scores = work.totals + MAX_ROWS;
    for (int next = 0; next < count; next += end++->count)
        *end = list_queries(&work, task, task->segments[end - parts], next, qkv, qkv_stride);
    for (Part *part = parts; part < end; part++) {
        if (part->own < work.begin) part->own = work.begin;
        long length = (part->end - work.begin + PAGE - 1) / PAGE * PAGE;
        work.stride = length > work.stride ? length : work.stride;
    }
    for (int q = 0; q < count; q++) work.peaks[q] = -INFINITY, work.totals[q] = 0, work.highest[q] = spread(-INFINITY);
    memset(work.out, 0, 4 * (size_t)(count * width));

    score_pages(&work, &all, work.begin, shared);
    for (const Part *part = parts; part < end; part++) score_pages(&work, part, part->own, part->end);
    for (int q = 0; q < count; q++)
        for (int j = 0; j < LANES; j++)
            if (work.highest[q][j] > work.peaks[q]) work.peaks[q] = work.highest[q][j];
    add_pages(&work, &all, work.begin, shared, after);
    for (const Part *part = parts; part < end; part++) {
        add_pages(&work, part, part->own, part->end, after);
        finish(&work, part, attended);
    }
}

/* A thread has tasks that follow each other, of about the same cost as the others'. */
void attention(const Model *model, const Layer *layer, const Step *step, const Task *tasks, int num_tasks) {
    long stride = (long)(model->heads + 2 * model->kv_heads) * model->head_dim;
#pragma omp for schedule(static) nowait
    for (int i = 0; i < step->rows * model->kv_heads; i++) {
        int s = 0, row = i / model->kv_heads;
        while (row >= step->segments[s].start + step->segments[s].count) s++;
        cache_head(model, layer, step, &step->segments[s], row, i % model->kv_heads, step->mixed + row * stride);
    }
    meet(step);
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const Task *last = &tasks[num_tasks - 1];
    for (const Task *task = tasks; task <= last; task++) {
        if ((task->before + task->cost / 2) * threads / (last->before + last->cost) != thread) continue;
        const Task *next = task < last ? task + 1 : task;
        float *memory = step->scores + thread * step->scores_per_thread;
        if (model->tiled_cache)
            attend_in_tiles(model, layer, task, step->mixed, stride, step->attended, memory, next);
        else
            attend(model, layer, task, step->mixed, stride, step->attended, memory,
                   key_at(model, layer, next->segments[0]->table[0], next->kv_head, 0));
    }
    meet(step);
}
