"""A session's replies: plain steps that its peer has not read share a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from outrider.engine.mock import MockEngine
from outrider.multiplex.direct_call import DirectCall
from outrider.multiplex.stream import MultiplexedStream
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.hidden_states.messages import StateSpec, StateSpecs
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import (
    FinishReason,
    Guess,
    TokenKind,
    TokenLogprobs,
    Verdict,
    VerifySteering,
    VerifyTimings,
)
from outrider.speculation.grammar import GrammarMatcher
from outrider.speculation.sampling import adjust
from outrider.v1 import verifier_pb2 as pb
from verifier.session import MAX_UNREAD_REPLIES, Ended, Rejection, VerifyOpening, VerifySession

PROMPT = (1, 2, 3)


def opened(plain_steps: int | None = 32) -> VerifySession:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=64, logprobs=0)
    steering = VerifySteering(plain_steps=plain_steps)
    opening = VerifyOpening("one", 1, PROMPT, len(PROMPT), params, steer=steering)
    return VerifySession(opening, MockEngine().info, torch.device("cpu"))


def test_an_opening_has_what_its_message_has() -> None:
    params = SamplingParams(seed=1)
    opening = VerifyOpening("s", 2, PROMPT, 3, params, VerifySteering(gamma=4), True, "salt", "tenant")
    sent = {name: getattr(opening, name) for name in pb.OpenVerify.DESCRIPTOR.fields_by_name}
    steer = convert.verify_steering_to_proto(opening.steer)
    message = pb.OpenVerify(**sent | {"params": convert.params_to_proto(params), "steer": steer})
    assert convert.opening_from_proto(VerifyOpening, pb.VerifyRequest(open=message)) == replace(
        opening, params=replace(params, verification=params.mode)
    )


def commit(session: VerifySession, count: int, **fields: object) -> None:
    """Commit the tokens 10, 11, … of plain steps, each with its number as its times."""
    for _ in range(count):
        number = len(session.committed) - len(PROMPT)
        logprobs = (TokenLogprobs(-float(number)),)
        times = VerifyTimings(number, number, cached_tokens=7 if number == 0 else 0, draft_us=100)
        at = len(session.committed)
        verdict = Verdict(at, (10 + number,), 0, TokenKind.PLAIN, timings=times, logprobs=logprobs)
        for name, value in fields.items():
            setattr(verdict, name, value)
        session.commit(verdict)


async def test_plain_steps_that_are_unread_share_a_verdict() -> None:
    session = opened()
    commit(session, 4)
    commit(session, 1, finish_reason=FinishReason.LENGTH)
    session.end()
    verdict = await session.next_reply()
    assert isinstance(verdict, Verdict)
    assert (verdict.position, verdict.tokens, verdict.accepted) == (3, (10, 11, 12, 13, 14), 0)
    assert verdict.steps == 5
    assert [each.logprob for each in verdict.logprobs] == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert (verdict.timings.wait_us, verdict.timings.step_us) == (4, 4), "those of the last step"
    assert verdict.timings.cached_tokens == 7, "what the first verdict reports"
    assert verdict.timings.draft_us == 500, "that of all steps"
    assert verdict.finish_reason is FinishReason.LENGTH
    assert await session.next_reply() == Ended(None)


async def test_steps_share_a_verdict_from_the_first_one_that_a_late_peer_has_to_wait_for() -> None:
    """Each verdict costs the peer about the same, however many steps it has."""
    session, reads = opened(), asyncio.Event()
    session.peer = peer(reads.is_set, lambda: as_none(reads.wait()))
    session.send = lambda verdict: pytest.fail("it would pass those that wait")
    commit(session, 1)
    reading = asyncio.create_task(session.next_reply())
    for _ in range(3):
        await asyncio.sleep(0)
        commit(session, 1)
    reads.set()
    commit(session, 1)
    verdict = await reading
    assert isinstance(verdict, Verdict)
    assert verdict.tokens == (10, 11, 12, 13, 14)


def peer(ready: Callable[[], bool], readable: Callable[[], Awaitable[None]]) -> DirectCall:
    return DirectCall((), cast(MultiplexedStream, None), bytes, ready, readable)


async def as_none(waiting: Awaitable[object]) -> None:
    await waiting


async def test_a_session_that_guesses_waits_for_no_late_peer_to_send_a_verdict() -> None:
    session = opened(1)
    session.peer = peer(bool, lambda: pytest.fail("its next guesses need the verdict"))
    commit(session, 1)
    assert isinstance(await session.next_reply(), Verdict)


async def test_an_end_waits_for_no_late_peer() -> None:
    session = opened()
    session.peer = peer(bool, lambda: pytest.fail("its status is no message"))
    session.end()
    assert await session.next_reply() == Ended(None)


async def test_a_verdict_that_is_read_at_once_stands_alone() -> None:
    session = opened()
    for number in range(3):
        commit(session, 1)
        verdict = await session.next_reply()
        assert isinstance(verdict, Verdict)
        assert verdict.tokens == (10 + number,)


async def test_guesses_states_and_refusals_keep_their_place() -> None:
    session = opened()
    commit(session, 2)
    guessed = Verdict(5, (50, 51), 1, TokenKind.BONUS, proposed=1, nodes=1)
    session.commit(guessed)
    commit(session, 2)
    session.reject(InvalidRequest("wrong"), 1)
    commit(session, 1)
    commit(session, 1, layer_states=("states",))
    replies = [await session.next_reply() for _ in range(6)]
    verdicts = [reply for reply in replies if isinstance(reply, Verdict)]
    assert [(each.position, len(each.tokens)) for each in verdicts] == [(3, 2), (5, 2), (7, 2), (9, 1), (10, 1)]
    assert verdicts[1] == guessed
    assert isinstance(replies[3], Rejection)
    assert session.outbox.empty()


@pytest.mark.parametrize(("plain_steps", "lengths"), [(4, [4, 4, 1]), (1, [1] * 9), (None, [1] * 9), (0, [1] * 9)])
async def test_a_verdict_has_no_more_steps_than_the_peer_takes(plain_steps: int | None, lengths: list[int]) -> None:
    session = opened(plain_steps)
    commit(session, 9)
    verdicts = [await session.next_reply() for _ in lengths]
    assert [len(each.tokens) for each in verdicts if isinstance(each, Verdict)] == lengths


async def test_a_stalled_session_goes_on_once_half_is_read() -> None:
    session = opened(32)
    commit(session, 66)
    assert session.check_backlog()
    assert isinstance(await session.next_reply(), Verdict)
    assert not session.resume_after_read()
    await session.next_reply()
    assert session.resume_after_read()
    assert not session.check_backlog()


def test_refusals_that_nobody_reads_are_bounded() -> None:
    session = opened()
    for _ in range(MAX_UNREAD_REPLIES + 1):
        session.reject(InvalidRequest("a wrong guess"), 1)
    with pytest.raises(InvalidRequest, match="unread"):
        session.reject(InvalidRequest("a wrong guess"), 1)


def test_a_grammar_with_slow_masks_has_few_guesses_in_a_step() -> None:
    """The other sessions of the step wait for its masks."""
    session = opened()
    session.guide = cast(GrammarMatcher, SimpleNamespace(affordable_masks=lambda seconds: int(seconds / 0.01)))
    session.add_guess(Guess(3, 1, 0, (10, 11, 12, 13)))
    assert len(session.block(8).tokens) == 2


def test_a_request_may_fill_the_context_and_not_more() -> None:
    model = replace(MockEngine().info, context_length=10)
    fitting = VerifyOpening("one", 1, PROMPT, len(PROMPT), SamplingParams(seed=1, max_tokens=7))
    fitting.check(model)
    with pytest.raises(InvalidRequest, match="at most 7"):
        replace(fitting, params=SamplingParams(seed=1, max_tokens=8)).check(model)
    resumed = replace(fitting, tokens=(*PROMPT, *range(6)))
    resumed.check(model)
    with pytest.raises(InvalidRequest, match="fewer than params"):
        replace(resumed, tokens=(*PROMPT, *range(7))).check(model)


def test_a_number_names_the_same_hidden_states_all_the_time() -> None:
    session = opened()
    one, other = StateSpec(number=1), StateSpec(number=1, float8=True)
    session.steer(VerifySteering(states=StateSpecs((one,))))
    with pytest.raises(InvalidRequest, match=r"states\.number is 1"):
        session.steer(VerifySteering(gamma=7, states=StateSpecs((other,))))
    with pytest.raises(InvalidRequest, match=r"states\.number is 1"):
        session.steer(VerifySteering(states=StateSpecs((StateSpec(number=2, float8=True), other))))
    assert (session.gamma, session.hidden_states.specs) == (0, (one,)), "nothing of it holds"
    session.steer(VerifySteering(states=StateSpecs()))
    session.steer(VerifySteering(states=StateSpecs((one,))))
    for number in range(2, 257):
        session.steer(VerifySteering(states=StateSpecs((StateSpec(number=number),))))
    with pytest.raises(InvalidRequest, match=r"states\.number is 257"):
        session.steer(VerifySteering(states=StateSpecs((StateSpec(number=257),))))
    assert len(session._states) == 256, "what is refused takes no memory"
    session.steer(VerifySteering(states=StateSpecs((one,))))


def test_the_last_tokens_do_not_wait_for_more_guesses_than_they_can_use() -> None:
    session = opened()
    session.steer(VerifySteering(gamma=8, draft_wait_us=5_000_000))
    commit(session, 60)
    assert session.remaining == 4
    now = session.waiting_since
    session.add_guess(Guess(63, 1, 0, (1, 2)))
    assert session.ready_at(now) == pytest.approx(now + 5)
    session.add_guess(Guess(65, 3, 2, (3,)))
    assert session.ready_at(now) == now
    assert len(session.block(8).tokens) == 3, "the fourth is the target's own"
    session.add_guess(Guess(66, 4, 3, (4,)))
    assert len(session.block(8).tokens) == 3


def test_an_output_ends_with_the_token_that_completes_its_grammar() -> None:
    session = opened()
    assert session.truncate_output((10, 11, 12), 2) == ([10, 11], FinishReason.STOP)
    assert session.truncate_output((10, 11), None) == ([10, 11], FinishReason.NONE)
    commit(session, 62)
    assert session.truncate_output((10, 11), None) == ([10, 11], FinishReason.LENGTH)


def test_penalties_are_for_what_every_step_has_committed() -> None:
    params = SamplingParams(seed=1, max_tokens=64, presence_penalty=1.0)
    session = VerifySession(VerifyOpening("one", 1, PROMPT, 3, params), MockEngine().info, torch.device("cpu"))
    commit(session, 2)
    assert session.history is not None
    logits = adjust(torch.zeros(1, MockEngine().info.vocab_size), params, session.history, [()])
    assert logits[0].nonzero()[:, 0].tolist() == [10, 11]
