"""The verification loop when its target fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch

from outrider.engine import SessionTokens, StepResult
from outrider.engine.mock import MockEngine
from outrider.hidden_states.projection import PackedProjection, Projection
from outrider.observability.metrics import VerifierMetrics
from outrider.protocol.errors import InvalidRequest, PeerLost, Unavailable
from outrider.protocol.hidden_states.messages import StateSpec, StateSpecs
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason, Guess, TokenKind, Verdict, VerifySteering
from outrider.settings.verifier import VerifierSettings
from verifier.batching import ScheduledSession
from verifier.engine_target import EngineTarget
from verifier.loop import VerificationLoop
from verifier.session import MAX_UNREAD_REPLIES, Ended, Rejection, VerifyOpening, VerifySession
from verifier.target import TargetFailed, VerifyStep

LIMITS = VerifierSettings(
    max_sessions=8, max_waiting=0, kv_tokens=4096, prefill_rows=64, prefill_stretch=1.5, guess_rows=8
)


class BrokenEngine(MockEngine):
    """An engine whose forward pass raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        raise self.error


def broken_loop(error: Exception) -> VerificationLoop:
    return VerificationLoop(EngineTarget(BrokenEngine(error)), LIMITS, VerifierMetrics("broken"))


def opened(loop: VerificationLoop, name: str) -> VerifySession:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=8)
    return loop.open(VerifyOpening(name, 1, (1, 2, 3), 3, params))


async def ended(session: VerifySession) -> Ended:
    reply = await asyncio.wait_for(session.outbox.get(), 5)
    assert isinstance(reply, Ended)
    return reply


@pytest.mark.parametrize("error", [torch.AcceleratorError("CUDA error: device-side assert"), torch.OutOfMemoryError()])
async def test_an_error_of_the_device_ends_the_loop_and_moves_its_sessions(error: Exception) -> None:
    loop = broken_loop(error)
    session = opened(loop, "one")
    with pytest.raises(TargetFailed, match="the device failed"):
        await asyncio.wait_for(loop.run(), 5)
    assert isinstance((await ended(session)).error, PeerLost)
    with pytest.raises(Unavailable):
        opened(loop, "two")
    loop.stop()


class UnsureTarget(EngineTarget):
    """A target that fails, and then cannot free a session: its state is unknown, as vLLM's is after an error."""

    is_closed = False

    def step(self, batch: Sequence[ScheduledSession]) -> VerifyStep:
        raise TargetFailed("vLLM failed")

    def free(self, session: VerifySession) -> None:
        raise AssertionError(f"no blocks of {session.id}")

    def close(self) -> None:
        super().close()
        self.is_closed = True


async def test_a_target_that_cannot_free_a_session_is_closed() -> None:
    """Otherwise its processes would stay."""
    target = UnsureTarget(MockEngine())
    loop = VerificationLoop(target, LIMITS, VerifierMetrics("unsure"))
    opened(loop, "one")
    with pytest.raises(TargetFailed):
        await asyncio.wait_for(loop.run(), 5)
    with pytest.raises(AssertionError, match="no blocks of one"):
        loop.stop()
    assert target.is_closed


class LayersEngine(MockEngine):
    """An engine whose sessions have states after one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.state_shape = (1, 1)

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        computed = super().extend(batch)
        states = [part.expand(-1, 2) for part in computed.hidden_states]
        return StepResult(computed.all_logits, computed.counts, states, (1,))


async def test_a_session_learns_that_its_projection_is_gone() -> None:
    target = EngineTarget(LayersEngine())
    given = PackedProjection({"fc.weight": torch.ones(1, 1)}, 1e-5, (1,))
    gone = replace(given.spec, projection="0" * 64, number=2)
    target.projections._held[given.spec.projection] = Projection(given.data, 1, 1, target.device)
    loop = VerificationLoop(target, LIMITS, VerifierMetrics("layers"))
    asked = VerifySteering(states=StateSpecs((given.spec.numbered(1), gone)))
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=2)
    session = loop.open(VerifyOpening("one", 1, (1, 2, 3), 3, params, steer=asked, hidden_states=True))
    running = asyncio.create_task(loop.run())
    replies = [await asyncio.wait_for(session.outbox.get(), 5) for _ in range(4)]
    running.cancel()
    loop.stop()
    refused, *verdicts, end = replies
    assert isinstance(refused, Rejection)
    assert (refused.error.field, refused.error.value) == ("states.projection", "0" * 64)
    assert isinstance(end, Ended)
    for verdict in verdicts:
        assert isinstance(verdict, Verdict)
        assert verdict.hidden_states is not None
        assert [states.number for states in verdict.layer_states] == [1]


async def test_another_error_ends_only_the_sessions_of_its_step() -> None:
    loop = broken_loop(ValueError("a bug"))
    first = opened(loop, "one")
    running = asyncio.create_task(loop.run())
    assert isinstance((await ended(first)).error, PeerLost)
    second = opened(loop, "two")
    assert isinstance((await ended(second)).error, PeerLost), "the loop runs on"
    assert not running.done()
    running.cancel()
    loop.stop()


async def test_a_drafter_in_the_process_takes_verdicts_and_gives_guesses() -> None:
    loop = VerificationLoop(EngineTarget(MockEngine()), LIMITS, VerifierMetrics("linked"))
    session = opened(loop, "one")
    session.steer(VerifySteering(gamma=1, draft_wait_us=5_000_000, hidden_states=True))
    taken: list[Verdict] = []
    open_at_its_end = True

    def take(verdict: Verdict) -> bool:
        taken.append(verdict)
        return open_at_its_end

    assert loop.link("another", 1, 3, take) is None
    assert loop.link("one", 2, 3, take) is None
    give = loop.link("one", 1, 3, take)
    assert give is not None
    assert taken.pop().tokens == (1, 2, 3), "it begins with what is committed"
    running = asyncio.create_task(loop.run())
    first = await asyncio.wait_for(session.outbox.get(), 5)
    assert isinstance(first, Verdict)
    assert first.hidden_states is None, "states do not cross the stream as well"
    assert taken[0].tokens == first.tokens
    assert taken[0].hidden_states is not None
    open_at_its_end = False
    give(Guess(4, 1, 0, (5,), draft_us=70))
    second = await asyncio.wait_for(session.outbox.get(), 5)
    assert isinstance(second, Verdict)
    assert second.proposed == 1
    assert [tally.source for tally in second.sources] == [3]
    assert second.timings.draft_us == 70
    assert second.hidden_states is not None, "the drafter has left, so they are for another one"
    give(Guess(6, 2, 0, (7,), draft_us=30))
    third = await asyncio.wait_for(session.outbox.get(), 5)
    assert isinstance(third, Verdict)
    assert third.timings.draft_us == 30, "since the last verdict"
    give(Guess(5, 3, 0, (10**9,)))
    refused = await asyncio.wait_for(session.outbox.get(), 5)
    assert isinstance(refused, Rejection)
    assert refused.source == 3
    assert session.direct is None
    running.cancel()
    loop.stop()


async def test_a_bad_guess_of_a_linked_drafter_is_refused_however_many_refusals_are_unread() -> None:
    """The error rose into the loop of the drafter, whose end is that of the process."""
    metrics = VerifierMetrics("unread")
    loop = VerificationLoop(EngineTarget(MockEngine()), LIMITS, metrics)
    session = opened(loop, "one")
    give = loop.link("one", 1, 3, lambda _: True)
    assert give is not None
    for _ in range(MAX_UNREAD_REPLIES + 1):
        session.reject(InvalidRequest("bad"), 1)
    give(Guess(3, 1, 0, (10**9,)))
    assert session.outbox.qsize() == MAX_UNREAD_REPLIES + 2
    assert session.direct is None
    give(Guess(3, 1, 0, (10**9,)))
    assert session.outbox.qsize() == MAX_UNREAD_REPLIES + 2, "its turn is over"
    assert b'verifier_guesses_refused_total{model_name="unread"} 1.0' in metrics.render()[0]
    loop.stop()


async def test_a_number_of_hidden_states_that_comes_to_mean_others_ends_no_loop() -> None:
    """Rows of both were joined under it: the loop ended, and with it the process and all sessions."""
    loop = VerificationLoop(EngineTarget(MockEngine()), LIMITS, VerifierMetrics("numbers"))
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=200, ignore_eos=True)
    session, beside = (loop.open(VerifyOpening(name, 1, (1, 2, 3), 3, params)) for name in ("one", "two"))
    session.steer(VerifySteering(states=StateSpecs((StateSpec(number=1),))))
    running = asyncio.create_task(loop.run())
    for at in range(100):
        assert isinstance(await asyncio.wait_for(session.outbox.get(), 5), Verdict)
        with contextlib.suppress(InvalidRequest) if at else contextlib.nullcontext():
            session.steer(VerifySteering(states=StateSpecs((StateSpec(number=1, float8=at % 2 > 0),))))
    assert isinstance(await asyncio.wait_for(beside.outbox.get(), 5), Verdict)
    assert not running.done()
    running.cancel()
    loop.stop()


async def test_a_drafter_that_is_linked_late_gets_the_states_before() -> None:
    loop = VerificationLoop(EngineTarget(MockEngine()), LIMITS, VerifierMetrics("late"))
    session = opened(loop, "one")
    session.steer(VerifySteering(hidden_states=True))
    running, taken = asyncio.create_task(loop.run()), list[Verdict]()
    first = await asyncio.wait_for(session.outbox.get(), 5)
    assert isinstance(first, Verdict)
    assert first.hidden_states is not None, "for a drafter that was still to come"

    def take(verdict: Verdict) -> bool:
        taken.append(verdict)
        return True

    assert loop.link("one", 1, 3, take) is not None
    running.cancel()
    loop.stop()
    known = taken[0].hidden_states
    assert known is not None
    assert known.position == 0
    assert known.count >= first.hidden_states.count


async def test_tokens_after_a_stop_leave_no_log_probabilities() -> None:
    """A coordinator takes more of them than tokens for a violation, and shuns the verifier."""
    loop = VerificationLoop(EngineTarget(MockEngine()), LIMITS, VerifierMetrics("mock"))
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=8, logprobs=0, stop_token_ids=(6,))
    session = loop.open(VerifyOpening("one", 1, (1, 2, 3), 3, params))
    session.steer(VerifySteering(gamma=4, draft_wait_us=5_000_000))
    session.add_guess(Guess(3, 1, 0, (4, 5, 6, 7, 8)))
    running = asyncio.create_task(loop.run())
    sent: list[tuple[tuple[int, ...], int]] = []
    for _ in range(2):
        verdict = await asyncio.wait_for(session.outbox.get(), 5)
        assert isinstance(verdict, Verdict)
        sent.append((verdict.tokens, len(verdict.logprobs)))
    running.cancel()
    loop.stop()
    assert sent == [((4,), 1), ((5, 6), 2)]


async def verdicts(loop: VerificationLoop, session: VerifySession, count: int) -> list[Verdict]:
    running = asyncio.create_task(loop.run())
    replies = [await asyncio.wait_for(session.outbox.get(), 5) for _ in range(count)]
    running.cancel()
    loop.stop()
    assert all(isinstance(reply, Verdict) for reply in replies)
    return cast(list[Verdict], replies)


async def test_a_verdict_counts_the_guesses_up_to_the_end_of_the_output() -> None:
    """Those after a stop token were right as well, and brought nothing."""
    loop = VerificationLoop(EngineTarget(MockEngine()), LIMITS, VerifierMetrics("mock"))
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=8, stop_token_ids=(6,))
    session = loop.open(VerifyOpening("one", 1, (1, 2, 3), 3, params))
    session.steer(VerifySteering(gamma=3, draft_wait_us=5_000_000))
    session.add_guess(Guess(3, 1, 0, (4, 9, 5, 6, 3, 7), source=2, parents=(-1, 0, 0, 2, 3, 3)))
    _, last = await verdicts(loop, session, 2)
    assert (last.tokens, last.accepted, last.last) == ((5, 6), 2, TokenKind.NONE)
    assert last.finish_reason is FinishReason.STOP
    assert (last.proposed, last.nodes, last.accepted_from_branch) == (3, 5, 1)
    assert [(each.source, each.accepted) for each in last.sources] == [(2, 2)]


class CachingEngine(MockEngine):
    """An engine that has two tokens of every prompt."""

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return 2


async def test_what_the_cache_had_is_counted_once() -> None:
    metrics = VerifierMetrics("mock")
    loop = VerificationLoop(EngineTarget(CachingEngine()), LIMITS, metrics)
    found = await verdicts(loop, opened(loop, "one"), 3)
    assert [each.timings.cached_tokens for each in found] == [2, 0, 0]
    shown, _ = metrics.render()
    counted = [line.rpartition(" ") for line in shown.decode().splitlines() if not line.startswith("#")]
    assert [value for name, _, value in counted if "prefix_cache_queries_total" in name] == ["3.0"]
    assert [value for name, _, value in counted if "prefix_cache_hits_total" in name] == ["2.0"]


class ReturningTarget(EngineTarget):
    """A target that finds a session's tokens in its cache in each step, as after a preemption."""

    def step(self, batch: Sequence[ScheduledSession]) -> VerifyStep:
        done = super().step(batch)
        return replace(done, results=[each._replace(num_cached_tokens=2) for each in done.results])


async def test_what_a_preempted_session_computed_itself_is_no_cached_prompt() -> None:
    loop = VerificationLoop(ReturningTarget(MockEngine()), LIMITS, VerifierMetrics("returning"))
    found = await verdicts(loop, opened(loop, "one"), 3)
    assert [each.timings.cached_tokens for each in found] == [2, 0, 0]
