"""Step times: prompts get as many tokens as their own steps have shown to fit."""

from __future__ import annotations

import pytest

from outrider.protocol.cost_curve import CostCurve
from verifier.step_times import StepTimes

CURVE = CostCurve((1, 32, 64), (7.0, 49.0, 102.0))
STRETCH = 1.6
ROOM = 512
SESSIONS = 32


def chunks(steps: int, token_ms: float, slowdown: float = 1.0) -> list[int]:
    """Return the prompt tokens of each step beside `SESSIONS`, where a prompt's token takes `token_ms`."""
    times, found = StepTimes(CURVE), []
    for _ in range(steps):
        times.record(SESSIONS, slowdown * CURVE.at(SESSIONS), has_prompts=False)
        found.append(times.prompt_tokens(SESSIONS, STRETCH, ROOM))
        times.record(SESSIONS + found[-1], slowdown * (CURVE.at(SESSIONS) + found[-1] * token_ms), has_prompts=True)
    return found


def test_prompts_without_logits_get_the_time_that_these_would_take() -> None:
    slope = (CURVE.at(64) - CURVE.at(32)) / 32
    first, *_, last = chunks(40, 0.7 * slope)
    extra_ms = (STRETCH - 1) * CURVE.at(SESSIONS)
    assert first == int(extra_ms / slope)
    assert last == pytest.approx(extra_ms / (0.7 * slope), rel=0.15)


@pytest.mark.parametrize("token_ms", [0.8, 1.3, 2.6])
def test_the_chunks_of_a_prompt_are_steady(token_ms: float) -> None:
    """They have swung between eight tokens and hundreds, where the curve and the prompts' steps did not agree."""
    found = chunks(60, token_ms)[20:]
    assert max(found) <= 1.3 * min(found)


def test_a_machine_that_slows_down_leaves_the_share_of_prompts() -> None:
    assert chunks(80, 2.6, slowdown=2.0)[-1] == pytest.approx(chunks(80, 2.6)[-1], abs=1)


def test_one_step_with_a_stall_hardly_changes_the_share_of_prompts() -> None:
    times = StepTimes(CURVE)
    before = times.prompt_tokens(SESSIONS, STRETCH, ROOM)
    times.record(SESSIONS + 8, 100 * CURVE.at(SESSIONS + 8), has_prompts=True)
    assert before > 10
    assert times.prompt_tokens(SESSIONS, STRETCH, ROOM) > 0.7 * before


def test_one_stalled_step_hardly_changes_what_a_step_is_taken_to_last() -> None:
    """It did for sixty steps, in which keys with few sessions were taken to use fifteen times their time."""
    times = StepTimes(CURVE)
    times.record(SESSIONS, 100 * CURVE.at(SESSIONS), has_prompts=False)
    assert times.step_ms(SESSIONS) < 1.25 * CURVE.at(SESSIONS)


def test_prompts_that_take_no_time_are_bounded_all_the_same() -> None:
    """The sessions that decode have logits, which prompts do not show."""
    times = StepTimes(CURVE)
    for _ in range(200):
        times.record(SESSIONS + 8, 0.1, has_prompts=True)
    allowed_ms = STRETCH * CURVE.at(SESSIONS) / 0.8
    assert CURVE.at(SESSIONS + times.prompt_tokens(SESSIONS, STRETCH, ROOM)) <= allowed_ms
