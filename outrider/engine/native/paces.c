/* How many threads a step takes. No bit depends on it.
 *
 * The threads of a step wait for each other some hundred times. Where another process takes a core for a moment, all of
 * them wait, and where two threads share a core, the second one adds little. So steps with as many rows take half of
 * the threads, or fewer, where that has been faster: after a pause, steps with the present number and with half or twice
 * as many take turns, and their times are compared. A single long step, as other load delays now and then, decides
 * nothing. Several in a row end the pause, and a comparison that is clear ends early: a busy process can make two
 * threads slower than one by a factor. */

#include "model.h"

#define TURN 2         /* steps with one number before those with the other */
#define FEWEST 16      /* steps of a comparison, of both numbers together; after a long pause, a sixteenth of it */
#define CLEAREST 8     /* steps of a comparison that is clear, at least */
#define CLEAR 2.0f     /* times as slow */
#define LONGEST 4.0f   /* times as long as usual that a step counts at most */
#define FIRST_PAUSE 16 /* steps, also after a gain; doubled each time nothing was gained */
#define LONGEST_PAUSE 1024
#define SLOW 4         /* steps in a row that end a pause */
#define GAIN 0.97f     /* less is noise */

/* Returns null for steps so large that a comparison would take long. */
Pace *pace_of(Model *model, int rows) {
    int size = 0;
    while (rows >> (size + 1)) size++;
    return size < (int)(sizeof model->paces / sizeof *model->paces) ? &model->paces[size] : 0;
}

/* Whether a step of a comparison is one of the trial. */
static int tries(int step) { return step / TURN % 2; }

int outrider_pace_threads(const Pace *pace, int threads) {
    int trial = pace->pause && pace->at >= pace->pause && tries(pace->at - pace->pause);
    return threads >> (pace->halvings + (trial ? pace->trial : 0));
}

static int possible(int halvings, int threads) { return halvings >= 0 && threads >> halvings > 0; }

void outrider_pace_record(Pace *pace, int threads, float seconds) {
    if (threads < 2) return;
    if (!pace->pause) *pace = (Pace){.pause = FIRST_PAUSE, .trial = 1};
    int step = pace->at++ - pace->pause;
    if (pace->usual == 0 || (pace->pause == FIRST_PAUSE && step < 0 && seconds < pace->usual)) pace->usual = seconds;
    if (step < 0) {
        pace->slow = seconds > CLEAR * pace->usual ? pace->slow + 1 : 0;
        if (pace->slow == SLOW) pace->at = pace->pause;
        return;
    }
    float *sum = tries(step) ? &pace->other : &pace->own;
    *sum += seconds < LONGEST * pace->usual ? seconds : LONGEST * pace->usual;
    if (++step % (2 * TURN)) return; /* not yet as many of both */
    int steps = pace->pause / 16 > FEWEST ? pace->pause / 16 : FEWEST;
    int clear = pace->own > CLEAR * pace->other || pace->other > CLEAR * pace->own;
    if (step < (clear ? CLEAREST : steps)) return;
    int halvings = pace->halvings, trial = -pace->trial, pause = 2 * pace->pause;
    int gained = pace->other < GAIN * pace->own;
    if (gained) halvings += pace->trial, trial = pace->trial, pause = FIRST_PAUSE;
    *pace = (Pace){.halvings = halvings,
                   .trial = possible(halvings + trial, threads) ? trial : -trial,
                   .pause = pause < LONGEST_PAUSE ? pause : LONGEST_PAUSE,
                   .usual = 2 * (gained ? pace->other : pace->own) / step};
}
