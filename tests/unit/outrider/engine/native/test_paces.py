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
    assert found[:24] == [8] * 24, "nothing is tried before"
    assert found.count(8) > 0.97 * STEPS
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


def test_noise_does_not_cost_much() -> None:
    noise = random.Random(1)
    found = taken(4, lambda _, threads: (12.0 / threads + 2.0) * noise.lognormvariate(0.0, 0.3))
    assert found.count(4) > 0.9 * STEPS


def test_one_thread_stays_one() -> None:
    assert set(taken(1, lambda *_: 5.0, 200)) == {1}
