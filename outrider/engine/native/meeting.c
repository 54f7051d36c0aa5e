/* Where the threads of a step wait for each other, some hundred times in a step.
 *
 * A thread that waits spins for SHORT and then sleeps: another process takes a core, and may take this one. To wake it
 * takes longer than most parts of a step. The others therefore spin for LONG until it has come. If they slept meanwhile,
 * it would sleep in turn at the next meeting, and the step would consist of waking threads. Who spins for longer than
 * PATIENCE yields its core, which the late thread may be waiting for; each such wait halves the patience for the next.
 *
 * While other processes compute, the system may wake two threads of a step on one core and leave them there for a tenth
 * of a second. Each then spins while the other cannot run, and steps take four times as long. Who finds itself on the
 * core of a thread that it waits for moves to another one. */

#define _GNU_SOURCE /* for the core of a thread */
#include "model.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHORT 30e-6f /* seconds */
#define LONG 1e-3f
#define SPINS 64 /* between two looks at the clock */
#define MOST_MOVES 2 /* of the threads of a region: one takes tens of microseconds */
#define NO_CORE 0

static int over(const Meeting *meeting, int32_t round) {
    return __atomic_load_n(&meeting->round, __ATOMIC_ACQUIRE) != round;
}

static void relax(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Notes on which core this thread is; `asleep`: on none. */
static void note_core(Meeting *meeting, int asleep) {
    const int thread = omp_get_thread_num();
    if (thread < NOTED_THREADS) __atomic_store_n(&meeting->cores[thread], asleep ? NO_CORE : sched_getcpu() + 1, __ATOMIC_RELAXED);
}

/* Returns the first thread that was on this core when it came to a meeting last, and is not asleep; −1: none. */
static int thread_here(const Meeting *meeting) {
    const int core = sched_getcpu() + 1, threads = omp_get_num_threads();
    if (core == NO_CORE) return -1; /* the system does not tell */
    for (int other = 0; other < threads && other < NOTED_THREADS; other++)
        if (other != omp_get_thread_num() && __atomic_load_n(&meeting->cores[other], __ATOMIC_RELAXED) == core) return other;
    return -1;
}

/* Moves this thread to another core, if the process may use one. */
static void move(Meeting *meeting) {
    cpu_set_t allowed, others;
    __atomic_add_fetch(&meeting->moves, 1, __ATOMIC_RELAXED);
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    others = allowed;
    CPU_CLR(sched_getcpu(), &others);
    if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others)) sched_setaffinity(0, sizeof allowed, &allowed);
    note_core(meeting, 0);
}

/* Lets a thread on this core run: the one with the higher number moves, as both would else. */
static void part(Meeting *meeting) {
    const int other = thread_here(meeting);
    if (other < 0) return;
    if (other < omp_get_thread_num() && meeting->moves < MOST_MOVES)
        move(meeting);
    else
        sched_yield();
}

/* Returns whether the others have come. */
static int spin(Meeting *meeting, int32_t round) {
    const double began = omp_get_wtime();
    const float patience = meeting->patience;
    for (float waited = 0; waited < (meeting->late ? LONG : SHORT); waited = (float)(omp_get_wtime() - began)) {
        if (waited > patience) {
            if (meeting->patience == patience && patience > SHORT) meeting->patience = patience / 2;
            sched_yield();
        }
        for (int i = 0; i < SPINS; i++, relax())
            if (over(meeting, round)) return 1;
        part(meeting);
    }
    return 0;
}

/* For a test, compiled with -DLATE_WAKING: the last one to come is away for longer than others spin, now and then. */
static void lose_core(int32_t round) {
#ifdef LATE_WAKING
    if (round % 8 == 0) usleep(150);
#else
    (void)round;
#endif
}

void meet(const Step *step) {
    Meeting *meeting = step->meeting;
    const int32_t threads = omp_get_num_threads();
    if (threads == 1) return;
    const int32_t round = __atomic_load_n(&meeting->round, __ATOMIC_RELAXED);
    note_core(meeting, 0);
    if (__atomic_add_fetch(&meeting->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        meeting->arrived = 0;
        __atomic_store_n(&meeting->round, round + 1, __ATOMIC_SEQ_CST); /* who begins to sleep from here on sees it */
        /* The others may be at the next meeting by now, and asleep there: that is told to who comes last to it. */
        lose_core(round);
        meeting->late = __atomic_exchange_n(&meeting->sleeping[round & 1], 0, __ATOMIC_SEQ_CST);
        if (meeting->late) syscall(SYS_futex, &meeting->round, FUTEX_WAKE_PRIVATE, threads, 0, 0, 0);
        lose_core(round);
    } else if (!spin(meeting, round)) {
        note_core(meeting, 1);
        __atomic_store_n(&meeting->sleeping[round & 1], 1, __ATOMIC_SEQ_CST);
        while (!over(meeting, round)) syscall(SYS_futex, &meeting->round, FUTEX_WAIT_PRIVATE, round, 0, 0, 0);
    }
}

#else

void meet(const Step *step) {
    (void)step;
#pragma omp barrier
}

#endif
