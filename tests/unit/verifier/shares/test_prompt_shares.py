"""Prompts that wait have about as many tokens per millisecond beside guesses as beside plain decoding."""

from __future__ import annotations

import pytest

from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.settings.verifier import VerifierSettings
from tests.unit.verifier.test_batching import session
from verifier.batching import Batching
from verifier.session import VerifySession
from verifier.shares.prompt_shares import PromptShare
from verifier.step_times import StepTimes

FLAT = CostCurve((1, 64, 512), (100.0, 100.0, 660.0))  # as on a GPU
STEEP = CostCurve((1, 512), (10.0, 5120.0))  # every token costs as much as the first
LIMITS = VerifierSettings(
    max_sessions=64, max_waiting=0, kv_tokens=4096, prefill_rows=512, prefill_stretch=1.6, guess_rows=16
)


def kept(cost: CostCurve, waiting: int, sessions: int = 16, guesses: int = 8) -> int:
    return PromptShare(StepTimes(cost), LIMITS, sessions, waiting).num_guesses([guesses] * sessions, sessions)


def test_guesses_leave_prompts_the_places_that_cost_nothing() -> None:
    assert kept(FLAT, 500) == 0
    assert 0 < kept(FLAT, 20) < 8, "a few prompt tokens leave places"
    assert kept(FLAT, 500, sessions=1) == 8, "eight guesses take hardly any"


def test_guesses_stay_where_every_token_costs_the_same() -> None:
    assert kept(STEEP, 500) == 8


def test_guesses_stay_without_prompts_or_without_a_known_cost() -> None:
    assert kept(FLAT, 0) == 8
    assert kept(UNKNOWN_COST, 500) == 8
    assert PromptShare(StepTimes(FLAT), LIMITS, 0, 500).num_guesses([], 0) == 0


def prompt(length: int) -> VerifySession:
    opened = session("prompt", 0)
    opened.committed.extend([1] * length)
    opened.cache_length = 0
    return opened


@pytest.mark.parametrize(("cost", "checked"), [(FLAT, 0), (STEEP, 2)])
def test_a_step_with_prompts_checks_the_guesses_that_leave_room(cost: CostCurve, checked: int) -> None:
    decoding = [session(str(number), 0) for number in range(16)]
    batching = Batching(LIMITS, StepTimes(cost))
    alone, _ = batching.schedule(decoding, 1e9)
    assert [len(item.block.tokens) for item in alone] == [2] * 16
    batch, _ = batching.schedule([*decoding, prompt(500)], 1e9)
    *items, chunk = batch
    assert [len(item.block.tokens) for item in items] == [checked] * 16
    plain = StepTimes(cost).prompt_tokens(16, LIMITS.prefill_stretch, LIMITS.prefill_rows)
    assert len(chunk.pending) >= 0.9 * plain
