"""A step that sessions share checks the guesses that pay for all of them."""

from __future__ import annotations

import itertools

import pytest

from outrider.engine.mock import MockEngine
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import Distribution, Guess, TokenKind, Verdict, VerifySteering
from outrider.settings.verifier import VerifierSettings
from verifier.batching import Batching
from verifier.session import MAX_UNREAD_VERDICTS, VerifyOpening, VerifySession
from verifier.step_times import StepTimes

NARROW = CostCurve((1, 8, 16), (25.0, 25.0, 50.0))
FLAT = CostCurve((1, 16), (25.0, 25.0))
LIMITS = VerifierSettings(
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


class VirtualTime:
    """A clock of the sessions and of the steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("count", "guesses", "prompts"), [(8, 0, 0), (60, 0, 0), (60, 15, 0), (40, 0, 20)])
def test_no_session_of_a_key_with_many_waits_as_long_as_a_verifier_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, count: int, guesses: int, prompts: int
) -> None:
    """Steps of a large model on a CPU: what a key with one session leaves is too little for all of them in turns."""
    clock = VirtualTime()
    monkeypatch.setattr("verifier.session.time", clock)
    engine, params = MockEngine(), SamplingParams(seed=1, max_tokens=9999)
    lengths = [1] * (1 + count) + [500] * prompts
    sessions = [
        VerifySession(
            VerifyOpening(f"s{i}", 1, (1,) * length, length, params, tenant="heavy" if i else "light"),
            engine.info,
            engine.device,
        )
        for i, length in enumerate(lengths)
    ]
    cost = CostCurve((1, 64), (100.0, 100.0 + 63 * 12.0))
    batching = Batching(LIMITS.model_copy(update={"max_sessions": 64}), StepTimes(cost))
    ids = itertools.count(1, 100)
    last, longest, light = dict.fromkeys(sessions[: 1 + count], 0.0), 0.0, 0
    while clock.now < 60.0:
        for session in sessions[1 : 1 + count]:
            if guesses and not session.tree.depth:
                session.add_guess(Guess(len(session.committed), next(ids), 0, (7,) * guesses))
        batch, wait_s = batching.schedule(sessions, clock.now)
        ms = cost.at(sum(item.num_tokens for item in batch)) if batch else 1000 * (wait_s or 0.0)
        clock.now += ms / 1000
        batching.record(batch, ms)
        for item in batch:
            item.session.cache_length += len(item.pending)
            item.session.waiting_since = clock.now
            if not item.verifies:
                continue
            item.session.commit(Verdict(item.session.cache_length, (1,), 0, TokenKind.PLAIN))
            item.session.outbox.get_nowait()
            if item.session in last:
                longest, last[item.session] = max(longest, clock.now - last[item.session]), clock.now
            light += item.session is sessions[0]
    assert max(longest, *(clock.now - at for at in last.values())) < 8.0
    assert light > 0.75 * 60.0 / (cost.at(1) / 1000)


def test_prompts_of_a_key_with_many_sessions_count_as_waiting() -> None:
    """So coordinators give them time: no number of their tokens says when their turn comes."""
    engine, params = MockEngine(), SamplingParams(seed=1, max_tokens=9)
    tenants = ["light"] + ["heavy"] * 4
    sessions = [
        VerifySession(VerifyOpening(f"s{i}", 1, (1,) * 50, 50, params, tenant=tenant), engine.info, engine.device)
        for i, tenant in enumerate(tenants)
    ]
    batching = Batching(LIMITS, StepTimes(NARROW))
    for seconds, computed in ((0.0, 1), (100.0, 2)):
        batch, _ = batching.schedule(sessions, sessions[0].opened_at + seconds)
        assert len(batch) >= computed
        assert batching.waiting == 4 - sum(item.session.tenant == "heavy" for item in batch)
    batching.schedule(sessions[1:], sessions[0].opened_at)
    assert batching.waiting == 0


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


def test_a_key_with_many_sessions_that_owes_time_is_asked_again_soon() -> None:
    """Nothing else wakes the loop for it: the only other session waits for a guess."""
    engine, params = MockEngine(), SamplingParams(seed=1, max_tokens=9)
    sessions = [
        VerifySession(VerifyOpening(f"s{i}", 1, (1,), 1, params, tenant=tenant), engine.info, engine.device)
        for i, tenant in enumerate(["light"] + ["heavy"] * 4)
    ]
    for each in sessions:
        each.commit(Verdict(1, (1,), 0, TokenKind.PLAIN))
        each.cache_length = 1
    light, now = sessions[0], sessions[0].waiting_since
    batching = Batching(LIMITS, StepTimes(NARROW))
    batch, _ = batching.schedule(sessions, now)
    assert len(batch) > 1
    batching.record(batch, 1000.0)
    light.steer(VerifySteering(gamma=2, draft_wait_us=10_000_000))
    batch, wait_s = batching.schedule(sessions, now + 0.01)
    assert not batch
    assert wait_s is not None
    assert wait_s < 0.1


def prompts_of(tenant: str, count: int, length: int) -> list[VerifySession]:
    engine, params = MockEngine(), SamplingParams(seed=1, max_tokens=9)
    openings = [VerifyOpening(f"{tenant}{i}", 1, (1,) * length, length, params, tenant=tenant) for i in range(count)]
    return [VerifySession(opening, engine.info, engine.device) for opening in openings]


def test_a_key_with_many_sessions_gets_the_places_that_cost_no_time_and_no_more() -> None:
    light, heavy = session("light", 0), prompts_of("heavy", 4, 5)
    now, batching = light.opened_at, Batching(LIMITS, StepTimes(NARROW))
    batching.schedule(heavy, now)  # alone it owes and is owed nothing
    light.steer(VerifySteering(gamma=0, nodes=1))
    batch, _ = batching.schedule([light, *heavy], now + 0.001)
    assert batch[0].session is light
    assert sum(item.num_tokens for item in batch) == 8, "as many as take the time of one"


@pytest.mark.parametrize("cost", [NARROW, UNKNOWN_COST])
def test_a_session_whose_peer_does_not_read_takes_no_time_from_a_key_with_many(cost: CostCurve) -> None:
    """It has no step meanwhile. The others would get what is left beside it, or nothing."""
    unread, heavy = session("light", 0), prompts_of("heavy", 40, 1)
    for _ in range(MAX_UNREAD_VERDICTS + 1):
        unread.outbox.put_nowait(Verdict(3, (7,), 0, TokenKind.PLAIN))
    batch, _ = Batching(LIMITS, StepTimes(cost)).schedule([unread, *heavy], unread.opened_at)
    assert [item.session for item in batch] == heavy


@pytest.mark.parametrize("decoding", [True, False])
def test_prompts_teach_nothing_of_the_time_of_decoding(decoding: bool) -> None:
    times = StepTimes(FLAT)
    batching = Batching(LIMITS, times)
    sessions = [*[session("decodes", 0)] * decoding, *prompts_of("prompt", 1, 30)]
    batch, _ = batching.schedule(sessions, 1e9)
    fitting = times.prompt_tokens(1, 1.5, 64)
    for _ in range(20):
        batching.record(batch, 100.0)
    assert times.step_ms(1) == pytest.approx(25.0)
    assert (times.prompt_tokens(1, 1.5, 64) < fitting) == decoding
