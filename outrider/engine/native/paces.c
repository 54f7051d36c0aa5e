/* How many threads a step takes. No bit depends on it.
 *
 * The threads of a step wait for each other some hundred times. Where another process takes a core for a moment, all of
 * them wait, and where two threads share a core, the second one adds little. So steps with as many rows take half of
 * the threads, or fewer, where that has been faster: after a pause, TURN steps with half or twice as many threads follow
 * TURN steps with the present number, and their times are compared. */

#include "model.h"

#define TURN 8
#define FIRST_PAUSE 16 /* steps; doubled each time nothing was gained */
#define LONGEST_PAUSE 1024
#define GAIN 0.97f /* less is noise */

/* Returns null for steps so large that a comparison would take long. */
Pace *pace_of(Model *model, int rows) {
    int size = 0;
    while (rows >> (size + 1)) size++;
    return size < (int)(sizeof model->paces / sizeof *model->paces) ? &model->paces[size] : 0;
}

int outrider_pace_threads(const Pace *pace, int threads) {
    int tries = pace->pause && pace->at >= pace->pause + TURN;
    return threads >> (pace->halvings + (tries ? pace->trial : 0));
}

static int possible(int halvings, int threads) { return halvings >= 0 && threads >> halvings > 0; }

void outrider_pace_record(Pace *pace, int threads, float seconds) {
    if (threads < 2) return;
    if (!pace->pause) *pace = (Pace){.pause = FIRST_PAUSE, .trial = 1};
    int turn = pace->at++ - pace->pause;
    if (turn < 0) return;
    if (turn < TURN)
        pace->own += seconds;
    else
        pace->other += seconds;
    if (turn < 2 * TURN - 1) return;
    int gained = pace->other < GAIN * pace->own, longer = 2 * pace->pause;
    int halvings = pace->halvings + (gained ? pace->trial : 0), trial = gained ? pace->trial : -pace->trial;
    *pace = (Pace){.halvings = halvings,
                   .trial = possible(halvings + trial, threads) ? trial : -trial,
                   .pause = gained ? FIRST_PAUSE : longer < LONGEST_PAUSE ? longer : LONGEST_PAUSE};
}
