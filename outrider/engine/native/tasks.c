/* The tasks of a step's attention. Queries of a session are shared out evenly: a task is as few as fit in registers or
 * tiles together. Sessions that begin with the same pages follow each other, so that what one has read is near for the
 * next. Where there is room for the queries of several, these are one task and read the pages that they share once. */

#include "tasks.h"

#define FEWEST_SHARED 2 /* pages: with fewer, it costs more to join tasks than it saves */

/* The pages that two segments begin with, both with tokens that were cached before. */
static int pages_shared(const Segment *one, const Segment *other) {
    int most = (one->base < other->base ? one->base : other->base) / PAGE, pages = 0;
    while (pages < most && one->table[pages] == other->table[pages]) pages++;
    return pages;
}

/* Lists the segments so that each shares most with the one before it, and how many pages. */
static void order_segments(const Step *step, const Segment **ordered, int *shared) {
    int n = step->num_segments;
    for (int i = 0; i < n; i++) ordered[i] = &step->segments[i], shared[i] = 0;
    for (int i = 1; i < n; i++) {
        int best = i;
        for (int j = i; j < n && (!shared[i] || shared[i] < shared[i - 1]); j++) {
            int pages = pages_shared(ordered[i - 1], ordered[j]);
            if (pages > shared[i]) shared[i] = pages, best = j;
        }
        const Segment *moved = ordered[best];
        ordered[best] = ordered[i], ordered[i] = moved;
    }
}

/* The shortest window of a layer; 0: none. */
static int shortest_window(const Model *model) {
    int shortest = 0;
    for (int l = 0; l < model->num_layers; l++) {
        int window = model->layers[l].window;
        if (window && (!shortest || window < shortest)) shortest = window;
    }
    return shortest;
}

/* Whether all rows of a segment see pages that it shares, in every layer. */
static int reaches(const Segment *segment, int shared, int window) {
    return !window || segment->base + segment->count - window < shared * PAGE;
}

/* Lets a task have the queries of a further segment; returns whether it can. */
static int join(Task *task, const Segment *segment, int shared, int window, int group, int most) {
    int count = task->count + segment->count * group;
    if (task->num_segments > 1 && task->shared < shared) shared = task->shared;
    if (count > most || shared < FEWEST_SHARED) return 0;
    if (!reaches(segment, shared, window) || !reaches(task->segments[0], shared, window)) return 0;
    task->segments[task->num_segments++] = segment;
    task->count = count, task->shared = shared;
    return 1;
}

/* Of a key head: its keys are read, and each query has its scores. */
static long cost_of(const Task *task, int group) {
    long shared = (long)task->shared * PAGE, cost = shared * (task->count + 4);
    for (int s = 0; s < task->num_segments; s++) {
        const Segment *segment = task->segments[s];
        int count = task->num_segments > 1 ? segment->count * group : task->count;
        cost += (segment->base + (task->first + count) / group + PAGE - shared) * (count + 4l);
    }
    return cost;
}

Task *list_tasks(const Model *model, const Step *step, int *num_tasks) {
    int n = step->num_segments, group = model->heads / model->kv_heads, window = shortest_window(model);
    int most = model->tiled_cache ? QUERIES : MAX_ROWS, shared[n];
    const Segment *ordered[n];
    order_segments(step, ordered, shared);
    Task *tasks = malloc(sizeof(Task) * (size_t)(model->kv_heads * (n + (long)step->rows * group / most)));
    long before = 0;
    *num_tasks = 0;
    for (int i = 0; i < n && tasks;) {
        Task task = {.segments = {ordered[i]}, .num_segments = 1, .count = ordered[i]->count * group};
        while (++i < n && join(&task, ordered[i], shared[i], window, group, most)) continue;
        int queries = task.count, parts = (queries + most - 1) / most;
        for (int part = 0; part < parts; part++)
            for (int h = 0; h < model->kv_heads; h++, before += task.cost) {
                task.kv_head = h, task.before = before;
                task.first = queries * part / parts, task.count = queries * (part + 1) / parts - task.first;
                task.cost = cost_of(&task, group);
                tasks[(*num_tasks)++] = task;
            }
    }
    return tasks;
}
