"""The number of threads of a step follows what steps with as many rows took."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest

from outrider.engine.native.build import library, structures

STEPS = 4000


def taken(threads: int, milliseconds: Callable[[int, int], float], steps: int = STEPS) -> list[int]:
    """Return the threads of each step. `milliseconds` has the number of the step and its threads."""
    kernels, pace = library(), structures().Pace()
    found = []
    for step in range(steps):
        found.append(kernels.outrider_pace_threads(ctypes.byref(pace), threads))
        seconds = ctypes.c_float(milliseconds(step, found[-1]) / 1000)
        kernels.outrider_pace_record(ctypes.byref(pace), threads, seconds)
    return found


def test_a_free_machine_gives_a_step_all_threads() -> None:
    found = taken(8, lambda _, threads: 8.0 / threads)
    assert found[:18] == [8] * 18, "nothing is tried before"
    assert found.count(8) > 0.96 * STEPS
    assert set(found) == {8, 4}


@pytest.mark.parametrize(("threads", "best"), [(2, 1), (8, 4), (8, 1), (12, 3)])
def test_fewer_threads_are_taken_where_they_are_faster(threads: int, best: int) -> None:
    found = taken(threads, lambda _, taken: 10.0 + abs(taken - best))
    assert found[-1] == best
    assert found.count(best) > 0.9 * STEPS


def test_the_choice_follows_what_changes() -> None:
    """Another process comes and goes."""
    found = taken(2, lambda step, threads: 9.0 if (1000 <= step < 3000) == (threads == 2) else 6.0, 8000)
    assert found[:1000].count(2) > 900
    assert found[2100:3000].count(1) > 850
    assert found[-1000:].count(2) > 900


def test_a_busy_process_is_noticed_at_once() -> None:
    """Its two threads wait for each other a hundred times longer than they compute, and the pause was long by then."""
    found = taken(2, lambda step, threads: 140.0 if threads == 2 and step >= 2500 else 4.5 - threads, 4000)
    assert found[2400:2500].count(2) == 100
    assert found[2500:2600].count(2) < 20
    assert found[2600:].count(2) < 60, "later trials end early"


def test_a_choice_that_a_moment_has_made_is_looked_at_again_soon() -> None:
    """Another process computed during one comparison, after a long pause: one thread was taken for a thousand steps."""
    disturbed = range(2140, 2210)  # it begins at step 2,146
    found = taken(2, lambda step, threads: 6.75 if step in disturbed and threads == 2 else 6.0 / threads + 0.4, 4000)
    assert found[disturbed.stop] == 1
    assert found[disturbed.stop :].count(1) < 100


def test_a_step_that_other_load_delays_decides_nothing() -> None:
    """Two threads take 2.5 ms, or 15 now and then, which one thread does not; the sum is still less."""
    found = taken(
        2, lambda step, threads: 15.0 if threads == 2 and step % 29 == 0 else 5.0 / threads + 0.4 * (threads == 1)
    )
    assert found.count(2) > 0.9 * STEPS


def test_noise_does_not_cost_much() -> None:
    noise = random.Random(1)
    found = taken(4, lambda _, threads: (12.0 / threads + 2.0) * noise.lognormvariate(0.0, 0.3))
    assert found.count(4) > 0.9 * STEPS


def test_one_thread_stays_one() -> None:
    assert set(taken(1, lambda *_: 5.0, 200)) == {1}
