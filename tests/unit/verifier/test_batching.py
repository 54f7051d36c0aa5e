"""A step that sessions share checks the guesses that pay for all of them."""

from __future__ import annotations

import pytest

from outrider.engine.mock import MockEngine
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import Distribution, Guess, VerifySteering
from verifier.batching import Batching
from verifier.limits import SchedulerLimits
from verifier.session import VerifyOpening, VerifySession
from verifier.step_times import StepTimes

NARROW = CostCurve((1, 8, 16), (25.0, 25.0, 50.0))
FLAT = CostCurve((1, 16), (25.0, 25.0))
LIMITS = SchedulerLimits(
    max_sessions=8, max_waiting=0, kv_tokens=4096, prefill_rows=64, prefill_stretch=1.5, guess_rows=16
)
CERTAIN = Distribution((7,), (65536,))


def session(name: str, paying: int, length: int = 4, mode: Verification = Verification.COUPLED) -> VerifySession:
    """Return a decoding session with a chain of guesses; a step takes at most two of them where it does not share."""
    engine = MockEngine()
    params = SamplingParams(seed=1, max_tokens=64, verification=mode)
    opening = VerifyOpening(name, 1, (1, 2, 3), 3, params, VerifySteering(nodes=2, paying_nodes=paying))
    opened = VerifySession(opening, engine.info, engine.device)
    opened.cache_length = 2
    probs = (CERTAIN,) * length if mode.needs_draft_probs else ()
    opened.add_guess(Guess(3, 1, 0, (7,) * length, probs))
    return opened


def checked(sessions: list[VerifySession], cost: CostCurve) -> list[int]:
    batch, wait_s = Batching(LIMITS, StepTimes(cost)).schedule(sessions, 1e9)
    assert wait_s is None
    assert [item.pending for item in batch] == [(3,)] * len(sessions)
    return [len(item.block.tokens) for item in batch]


@pytest.mark.parametrize("mode", [Verification.COUPLED, Verification.REJECTION])
def test_a_shared_step_checks_what_its_time_allows(mode: Verification) -> None:
    sessions = [session(name, 32, mode=mode) for name in "abcd"]
    assert checked(sessions, FLAT) == [4, 4, 4, 4]
    assert checked(sessions, NARROW) == [1, 1, 1, 1]


def test_guesses_of_a_session_that_does_not_share_are_checked_as_before() -> None:
    assert checked([session("a", 0), session("b", 0)], NARROW) == [2, 2]
    assert checked([session("a", 0), session("b", 32), session("c", 32)], NARROW)[0] == 2


def test_places_go_to_the_session_whose_guesses_held() -> None:
    good, poor = session("good", 32), session("poor", 32)
    for held, one in ((7, good), (8, poor)):
        for _ in range(3):
            one.committed.append(held)
            one.tree.commit((held,))
        one.cache_length = len(one.committed) - 1
        one.add_guess(Guess(6, 10, 0, (7,) * 5))
    batch, _ = Batching(LIMITS, StepTimes(CostCurve((1, 6, 12), (25.0, 25.0, 50.0)))).schedule([good, poor], 1e9)
    more, fewer = (len(item.block.tokens) for item in batch)
    assert more > fewer
    assert more + fewer == 4


def test_a_session_back_at_plain_decoding_has_none_of_its_guesses_checked_on_a_full_verifier() -> None:
    sessions = [session(name, 0) for name in "abcd"]
    full = CostCurve((1, 4, 8), (25.0, 25.0, 50.0))
    assert checked(sessions, full) == [2, 2, 2, 2]
    for one in sessions:
        one.steer(VerifySteering(gamma=0, draft_wait_us=0, nodes=0, paying_nodes=32))
    assert checked(sessions, full) == [0, 0, 0, 0]
    assert checked(sessions[:2], full) == [1, 1], "places that are free"


def test_without_a_known_cost_nothing_is_compared() -> None:
    assert checked([session("a", 32), session("b", 32)], UNKNOWN_COST) == [2, 2]


def test_steering_that_says_nothing_of_it_leaves_it() -> None:
    one = session("a", 32)
    one.steer(VerifySteering(gamma=1))
    assert one.paying_guesses == 32
    one.steer(VerifySteering(paying_nodes=0))
    assert one.paying_guesses == 0
