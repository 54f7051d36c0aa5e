/* Attention in AMX tiles over keys and values in bfloat16.
 *
 * Queries and weights (e^(score − peak)) are sums of two bfloat16 numbers each. A score adds both parts times 32
 * dimensions of the key, block after block. A row's output adds both parts of its weights times the values of 32
 * positions, aligned, block after block. Tiles add as tiles.c says. The sum of the weights has 16 lanes by position,
 * which are added at the end. All of it goes by a row's own positions: where a tree's nodes are in other slots, their
 * scores and values are gathered first, so a guess has the bits of the token that it becomes. A query is a row of the
 * tiles, and its bits depend on no other one. Masked weights are 0 and add nothing. So queries of several sessions go
 * together over the pages that these share, and then on with the pages of their own.
 */

#include "tiled_cache.h"
#include "tasks.h"

#if TILES

#define TWO_PARTS (2 * TILE)
#define FEW_PAGES 64 /* that are fetched a phase ahead: of values while scores are computed, of the next task's keys after */
typedef float Scores[QUERIES][PAGE]; /* of a page; weights take their place: 32 first parts, then the second ones */

typedef struct {
    const Segment *segment;
    int row, head, position;
} Query;

/* Queries of one segment. Pages: the first of their own, the first whose slots are not in the order of positions, and
 * the end of those that they see. */
typedef struct {
    int first, count, own, direct, end;
} Part;

/* What a task computes with. Memory is of the thread. */
typedef struct {
    const Model *model;
    const Layer *layer;
    const Task *task, *after;
    int begin, lowest; /* page; position */
    Query queries[QUERIES];
    char *tiles, *gathered; /* of queries: [blocks of dimensions][2 parts]; values of a page */
    float *out, *one;       /* sums, and those of some rows alone: [2 · QUERIES][panels · 16] */
    Scores *scores;         /* by page, from `begin` on, and one more */
} Work;

static long width_of(const Model *model) { return 16l * panels_of(model); }

static const char *keys_of(const Work *work, const Segment *segment, int page) {
    return page_at(work->model, work->layer->keys, tiled_keys(work->model), segment->table[page], work->task->kv_head);
}
static const char *values_of(const Work *work, const Segment *segment, int page) {
    return page_at(work->model, work->layer->values, tiled_values(work->model), segment->table[page], work->task->kv_head);
}

static void prepare_queries(Work *work, const float *qkv, long stride) {
    int dim = work->model->head_dim;
    for (int q = 0; q < work->task->count; q++) {
        const Query *query = &work->queries[q];
        const float *from = qkv + (query->segment->start + query->row) * stride + query->head * dim;
        for (int d = 0; d < dim; d += 32) {
            int left = dim - d;
            __mmask16 low = (__mmask16)(left < 16 ? (1 << left) - 1 : 0xffff);
            __mmask16 high = (__mmask16)(left < 32 ? left < 16 ? 0 : (1 << (left - 16)) - 1 : 0xffff);
            __m512i parts[2];
            split(_mm512_maskz_loadu_ps(low, from + d), _mm512_maskz_loadu_ps(high, from + d + 16), parts);
            for (int p = 0; p < 2; p++) _mm512_storeu_si512(work->tiles + d / 32 * TWO_PARTS + p * TILE + q * 64, parts[p]);
        }
    }
}

/* What is read next, and after that: a tile of each is fetched beside each tile of now. */
typedef struct {
    const char *next, *later;
} Coming;

INLINE void fetch_tile(Coming coming, int tile) {
    for (int i = 0; i < TILE && coming.next; i += 64) __builtin_prefetch(coming.next + tile * TILE + i, 0, 3);
    for (int i = 0; i < TILE && coming.later; i += 64) __builtin_prefetch(coming.later + tile * TILE + i, 0, 2);
}

/* As many queries go together from here on. */
static void configure(int queries) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.rows[t] = (uint8_t)(t < 6 ? queries : 16), config.bytes[t] = 64;
    configure_tiles(&config);
}

INLINE void score_half(const char *queries, const char *keys, const int blocks, Coming coming, int half, float *to) {
    TILE_ZERO(0);
    for (int d = 0; d < blocks; d++, queries += TWO_PARTS, keys += TILE) {
        fetch_tile(coming, half * blocks + d);
        TILE_LOAD(6, keys, 64);
        TILE_LOAD(2, queries, 64);
        TILE_LOAD(3, queries + TILE, 64);
        TILE_DOT(0, 2, 6);
        TILE_DOT(0, 3, 6);
    }
    TILE_STORE(0, to, 4 * PAGE);
}

/* Masks what queries do not see of a page, by position, and finds their largest scores. */
static void mask_page(const Work *work, const Part *part, int page, vec *peaks) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float(*rows)[PAGE] = work->scores[page - work->begin];
    int window = work->layer->window;
    for (int q = part->first; q < part->first + part->count; q++) {
        int last = work->queries[q].position;
        if (page * PAGE > last) continue;
        if (work->model->softcap > 0) cap_scores(rows[q], PAGE, work->model->softcap);
        int partial = page * PAGE + PAGE > last + 1 || (window && page * PAGE <= last - window);
        for (int i = 0; i < PAGE; i += 16) {
            __m512 values = _mm512_loadu_ps(rows[q] + i);
            if (partial) {
                __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(page * PAGE + i));
                __mmask16 seen = _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(last));
                if (window) seen &= _mm512_cmpgt_epi32_mask(at, _mm512_set1_epi32(last - window));
                values = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), values);
                _mm512_storeu_ps(rows[q] + i, values);
            }
            peaks[q] = larger((vec)values, peaks[q]);
        }
    }
}

/* Scores of pages from `from` on, with masks as far as slots are in the order of positions. */
static void score_pages(const Work *work, const Part *part, int from, int end, vec *peaks) {
    const Segment *segment = work->queries[part->first].segment;
    const char *queries = work->tiles + 64 * part->first;
    const int blocks = blocks_of(work->model);
    for (int page = from; page < end; page++) {
        const char *keys = keys_of(work, segment, page);
        const Coming coming = {page + 1 < end ? keys_of(work, segment, page + 1) : NULL,
                               page - work->begin < FEW_PAGES ? values_of(work, segment, page) : NULL};
        float *to = work->scores[page - work->begin][part->first];
        score_half(queries, keys, blocks, coming, 0, to);
        score_half(queries, keys + blocks * TILE, blocks, coming, 1, to + 16);
        if (page > from && page - 1 < part->direct) mask_page(work, part, page - 1, peaks);
    }
    if (end > from && end - 1 < part->direct) mask_page(work, part, end - 1, peaks);
}

/* Scores become weights in two parts. */
static void weigh_page(const Work *work, const Part *part, int page, const float *peaks, vec *totals) {
    float(*rows)[PAGE] = work->scores[page - work->begin];
    for (int q = part->first; q < part->first + part->count; q++) {
        __m512i parts[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        if (page * PAGE <= work->queries[q].position) {
            vec low = exponential(load(rows[q]) - peaks[q]), high = exponential(load(rows[q] + 16) - peaks[q]);
            totals[q] = totals[q] + low + high;
            split((__m512)low, (__m512)high, parts);
        }
        _mm512_storeu_si512(rows[q], parts[0]);
        _mm512_storeu_si512(rows[q] + 16, parts[1]);
    }
}

#define ADD_PANEL(tile, with)                                     \
    if (panels > tile) {                                          \
        fetch_tile(coming, v + tile);                             \
        TILE_LOAD(with, values + tile * TILE, 64);                \
        TILE_DOT(tile, 4, with);                                  \
        TILE_DOT(tile, 5, with);                                  \
    }

/* Keys that the next task begins with. */
static const char *next_keys(const Work *work, int page) {
    const Segment *segment = work->after->segments[0];
    if (page >= FEW_PAGES || page * PAGE >= segment->base + segment->count) return NULL;
    return page_at(work->model, work->layer->keys, tiled_keys(work->model), segment->table[page], work->after->kv_head);
}

/* Adds the values of pages to the sums of queries from `first` on: those of their segment's pages, or `gathered` ones. */
static void add_values(const Work *work, int first, int from, int end, const char *gathered, float *sums) {
    if (from >= end) return;
    const Segment *segment = work->queries[first].segment;
    const long width = width_of(work->model), stride = 4 * width;
    for (int v = 0; v < panels_of(work->model); v += 4) {
        const int panels = panels_of(work->model) - v < 4 ? panels_of(work->model) - v : 4;
        float *at = sums + 16 * v;
        TILE_LOAD(0, at, stride);
        if (panels > 1) TILE_LOAD(1, at + 16, stride);
        if (panels > 2) TILE_LOAD(2, at + 32, stride);
        if (panels > 3) TILE_LOAD(3, at + 48, stride);
        for (int page = from; page < end; page++) {
            const char *weights = (const char *)work->scores[page - work->begin][first];
            const char *values = (gathered ? gathered : values_of(work, segment, page)) + v * TILE;
            const Coming coming = {gathered || page + 1 == end ? NULL : values_of(work, segment, page + 1),
                                   gathered || first ? NULL : next_keys(work, page - from)};
            TILE_LOAD(4, weights, 4 * PAGE);
            TILE_LOAD(5, weights + 64, 4 * PAGE);
            ADD_PANEL(0, 6)
            ADD_PANEL(1, 7)
            ADD_PANEL(2, 6)
            ADD_PANEL(3, 7)
        }
        TILE_STORE(0, at, stride);
        if (panels > 1) TILE_STORE(1, at + 16, stride);
        if (panels > 2) TILE_STORE(2, at + 32, stride);
        if (panels > 3) TILE_STORE(3, at + 48, stride);
    }
}

/* The slots of a query's new positions. */
static void list_path(const Query *query, int *path) {
    const Segment *segment = query->segment;
    for (int i = 0; i < segment->count; i++)
        if (segment->sees[query->row * segment->count + i]) path[segment->depths[i]] = segment->base + i;
}

static int slot_at(const Segment *segment, const int *path, int position) {
    return segment->sees && position >= segment->base ? path[position - segment->base] : position;
}

/* The values of a page of positions that a query sees, 0 for the others. */
static const char *gather_values(const Work *work, const Query *query, const int *path, int page) {
    const Segment *segment = query->segment;
    int window = work->layer->window, panels = panels_of(work->model);
    for (int pair = 0; pair < PAGE / 2; pair++) {
        const char *from[2] = {NULL, NULL};
        int shift[2] = {0, 0};
        for (int i = 0; i < 2; i++) {
            int position = page * PAGE + 2 * pair + i;
            if (position > query->position || (window && query->position - position >= window)) continue;
            int slot = slot_at(segment, path, position);
            from[i] = values_of(work, segment, slot / PAGE) + slot % PAGE / 2 * 64;
            shift[i] = slot % 2 * 16;
        }
        for (int v = 0; v < panels; v++) {
            __m512i first = _mm512_setzero_si512(), second = first;
            if (from[0]) first = _mm512_srl_epi32(_mm512_loadu_si512(from[0] + v * TILE), _mm_cvtsi32_si128(shift[0]));
            if (from[1]) second = _mm512_srl_epi32(_mm512_loadu_si512(from[1] + v * TILE), _mm_cvtsi32_si128(shift[1]));
            first = _mm512_mask_blend_epi16(0xaaaaaaaau, first, _mm512_slli_epi32(second, 16));
            _mm512_storeu_si512(work->gathered + v * TILE + pair * 64, first);
        }
    }
    return work->gathered;
}

/* Puts the scores of a tree's rows from a page on into the order of their positions. */
static void gather_scores(const Work *work, const Part *part, int page) {
    for (int q = part->first; q < part->first + part->count; q++) {
        const Query *query = &work->queries[q];
        int first = page * PAGE, count = query->position + 1 - first, path[query->segment->count];
        float gathered[count];
        list_path(query, path);
        for (int i = 0; i < count; i++) {
            int slot = slot_at(query->segment, path, first + i);
            gathered[i] = work->scores[slot / PAGE - work->begin][q][slot % PAGE];
        }
        for (int i = 0; i < count; i++) work->scores[page - work->begin + i / PAGE][q][i % PAGE] = gathered[i];
    }
}

/* Continues the sums of `count` queries of one row from a page on, with the values of their own path. */
static void add_path(const Work *work, int first, int count, int from, float *sums) {
    const Query *query = &work->queries[first];
    const long width = width_of(work->model);
    int path[query->segment->count];
    if (query->segment->sees) list_path(query, path);
    memcpy(work->one, sums, 4 * (size_t)(count * width));
    for (int page = from; page <= query->position / PAGE; page++)
        add_values(work, first, page, page + 1, gather_values(work, query, path, page), work->one);
    memcpy(sums, work->one, 4 * (size_t)(count * width));
}

/* Sums that are no numbers: a weight of 0 does not keep a NaN or an infinity out, so the row goes without masked values. */
static void finish(const Work *work, const vec *totals, float *attended) {
    const long width = width_of(work->model);
    for (int q = 0; q < work->task->count; q++) {
        const Query *query = &work->queries[q];
        float *sums = work->out + q * width, total = sum(&totals[q]);
        vec zeros = {0};
        for (long i = 0; i < width; i += LANES) zeros = fused(load(sums + i), (vec){0}, zeros);
        if (sum(&zeros) != 0) {
            memset(sums, 0, 4 * (size_t)width);
            add_path(work, q, 1, work->begin, sums);
        }
        float factor = 1.0f / total;
        float *to = attended + ((long)(query->segment->start + query->row) * work->model->heads + query->head) *
                                   work->model->head_dim;
        for (int d = 0; d < work->model->head_dim; d++) to[d] = sums[d] * factor;
    }
}

static float *lay_out(Work *work, float *memory) {
    const Model *model = work->model;
    work->tiles = (char *)memory;
    work->gathered = work->tiles + (blocks_of(model) + 1l) * TWO_PARTS;
    work->out = (float *)(work->gathered + panels_of(model) * TILE);
    work->one = work->out + 2 * QUERIES * width_of(model);
    return work->one + 2 * QUERIES * width_of(model);
}

/* Numbers of scratch memory for a context. */
long tiled_scratch(const Model *model, long longest) {
    Work work = {.model = model};
    return lay_out(&work, NULL) - (float *)NULL + (longest / PAGE + 3) * QUERIES * PAGE;
}

/* Lists the queries of a task that are of one segment: query q of it belongs to row q / group. */
static Part list_queries(Work *work, const Segment *segment, int first, int next) {
    const Task *task = work->task;
    int group = work->model->heads / work->model->kv_heads, left = segment->count * group - task->first;
    int count = task->count - next < left ? task->count - next : left, highest = 0;
    for (int q = 0; q < count; q++) {
        int row = (first + q) / group, position = segment->base + (segment->depths ? segment->depths[row] : row);
        work->queries[next + q] = (Query){segment, row, task->kv_head * group + (first + q) % group, position};
        if (position > highest) highest = position;
        if (position < work->lowest) work->lowest = position;
    }
    int end = highest / PAGE + 1, direct = segment->sees && segment->base / PAGE < end ? segment->base / PAGE : end;
    return (Part){next, count, task->shared, direct, end};
}

/* Scores of the pages that are a part's own. */
static void score_part(const Work *work, const Part *part, vec *peaks) {
    const Segment *segment = work->queries[part->first].segment;
    configure(part->count);
    if (!segment->sees) {
        score_pages(work, part, part->own, part->direct, peaks);
        return;
    }
    score_pages(work, part, part->own, (segment->base + segment->count - 1) / PAGE + 1, peaks);
    gather_scores(work, part, part->direct);
    for (int page = part->direct; page < part->end; page++) mask_page(work, part, page, peaks);
}

/* Adds the values of the pages that are a part's own. */
static void add_part(const Work *work, const Part *part) {
    const long width = width_of(work->model);
    configure(part->count);
    add_values(work, part->first, part->own, part->direct, NULL, work->out + part->first * width);
    int q = part->first, end = q + part->count, next;
    for (; q < end && part->direct < part->end; q = next) {
        for (next = q + 1; next < end && work->queries[next].row == work->queries[q].row;) next++;
        add_path(work, q, next - q, part->direct, work->out + q * width);
    }
}

void attend_in_tiles(const Model *model, const Layer *layer, const Task *task, const float *qkv, long qkv_stride,
                     float *attended, float *memory, const Task *after) {
    Work work = {.model = model, .layer = layer, .task = task, .after = after, .lowest = INT32_MAX};
    Part parts[QUERIES], *end = parts, all = {0, task->count, 0, task->shared, task->shared};
    work.scores = (Scores *)lay_out(&work, memory);
    for (int next = 0; next < task->count; next += end++->count)
        *end = list_queries(&work, task->segments[end - parts], task->first, next);
    if (layer->window && work.lowest >= layer->window) work.begin = (work.lowest + 1 - layer->window) / PAGE;
    for (Part *part = parts; part < end; part++) {
        if (part->own < work.begin) part->own = work.begin;
        if (part->direct < part->own) part->direct = part->own;
    }
    prepare_queries(&work, qkv, qkv_stride);

    vec peaks[QUERIES], totals[QUERIES] = {{0}};
    float largest[QUERIES];
    for (int q = 0; q < task->count; q++) peaks[q] = spread(-INFINITY);
    configure(task->count);
    score_pages(&work, &all, work.begin, task->shared, peaks);
    for (const Part *part = parts; part < end; part++) score_part(&work, part, peaks);
    for (int q = 0; q < task->count; q++) {
        largest[q] = -INFINITY;
        for (int i = 0; i < 16; i++) largest[q] = peaks[q][i] > largest[q] ? peaks[q][i] : largest[q];
    }
    for (const Part *part = parts; part < end; part++)
        for (int page = work.begin; page < part->end; page++) weigh_page(&work, part, page, largest, totals);
    memset(work.out, 0, 4 * (size_t)(QUERIES * width_of(model)));
    configure(task->count);
    add_values(&work, 0, work.begin, task->shared, NULL, work.out);
    for (const Part *part = parts; part < end; part++) add_part(&work, part);
    finish(&work, totals, attended);
    release_tiles();
}

#else

long tiled_scratch(const Model *model, long longest) { return (void)model, (void)longest, 0; }
void attend_in_tiles(const Model *model, const Layer *layer, const Task *task, const float *qkv, long qkv_stride,
                     float *attended, float *memory, const Task *after) {
    (void)model, (void)layer, (void)task, (void)qkv, (void)qkv_stride, (void)attended, (void)memory, (void)after;
}

#endif
