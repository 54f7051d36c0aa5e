"""Whatever a verifier answers is either what an honest one could say, or a violation: never another error."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.sessions.hidden_states.asked_states import AskedStates
from coordinator.sessions.verdicts import SentMessages, VerdictReader
from outrider.protocol import convert
from outrider.protocol.errors import ProtocolViolation
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import Grammar, SamplingParams
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify

PROMPT = (1, 2, 3)
VOCAB = 50
EOS = 49
STOP = 48
TARGET = ModelInfo("target", "fingerprint", vocab_size=VOCAB, eos_token_ids=(EOS,))
GUESSED = 8


def reader(*, tokens: int = 0, features: bool = True, **params: Any) -> VerdictReader:
    """Of a session whose one drafter has guessed eight tokens."""
    given_params: dict[str, Any] = {"seed": 1, "max_tokens": 20, "stop_token_ids": (STOP,)} | params
    record = SessionRecord("s", SessionRequest(PROMPT, SamplingParams(**given_params)))
    record.tokens = [7] * tokens
    sent = SentMessages(states=AskedStates(final=features), messages=1, sources=1, guessed_to=record.position + GUESSED)
    return VerdictReader(record, TARGET, sent, time.monotonic())


def verdict(**fields: Any) -> verify.Verdict:
    """An honest one: two of four guesses held."""
    honest: dict[str, Any] = {
        "position": 3,
        "tokens": [7, 8, 9],
        "accepted": 2,
        "last": TokenKind.RECOVERED,
        "proposed": 4,
        "nodes": 4,
        "sources": [verify.SourceTally(source=1, proposed=4, accepted=2)],
        "timings": verify.VerifyTimings(sessions=1, batch_tokens=5, session_tokens=5, step_tokens=3),
    }
    return verify.Verdict(**(honest | fields))


def read(proto: verify.Verdict, at: VerdictReader | None = None) -> Any:
    return (at or reader()).verdict(proto, time.monotonic())


def entry(logprob: float = -1.0, *, ids: int = 2, top: float = -1.0) -> verify.TokenLogprobs:
    return verify.TokenLogprobs(logprob=logprob, top_ids=range(ids), top_logprobs=[top] * ids)


def plain(*tokens: int, **fields: Any) -> verify.Verdict:
    """Of a step without guesses."""
    bare: dict[str, Any] = {"accepted": 0, "proposed": 0, "nodes": 0, "sources": [], "last": TokenKind.PLAIN}
    return verdict(**({"tokens": tokens} | bare | fields))


def beside() -> VerdictReader:
    """Of a session whose drafter is in the verifier's process, and which takes plain steps together."""
    made = reader(max_tokens=200)
    made._sent.direct, made._sent.plain_steps = True, 32
    return made


HONEST: dict[str, Callable[[], Any]] = {
    "some held": lambda: read(verdict()),
    "all held": lambda: read(verdict(tokens=[7] * 5, accepted=4, last=TokenKind.BONUS)),
    "none held": lambda: read(verdict(tokens=[9], accepted=0, sources=[])),
    "plain": lambda: read(plain(9)),
    "plain steps together, and a long guess for the next": lambda: read(plain(*[9] * 32, remaining_depth=47), beside()),
    "guesses for what comes after": lambda: read(verdict(remaining_depth=5)),
    "the last that may be": lambda: read(plain(9, position=22, finish_reason=FinishReason.LENGTH), reader(tokens=19)),
    "an accepted stop": lambda: read(
        verdict(tokens=[7, STOP], accepted=2, last=TokenKind.NONE, finish_reason=FinishReason.STOP)
    ),
    "a stop of its own": lambda: read(plain(EOS, finish_reason=FinishReason.STOP)),
    "an end token that is ignored": lambda: read(plain(EOS), reader(ignore_eos=True)),
    "the end of a grammar": lambda: read(plain(9, finish_reason=FinishReason.STOP), reader(grammar=Grammar(regex="a"))),
    "logprobs": lambda: read(verdict(logprobs=[entry()] * 3), reader(logprobs=2)),
    "hidden states": lambda: read(verdict(hidden_states=common.HiddenStates(position=2, width=4, rows=b"x" * 24))),
    "no times": lambda: read(verdict(timings=verify.VerifyTimings())),
}

HOSTILE: dict[str, Callable[[], Any]] = {
    "no token": lambda: read(verdict(tokens=[], accepted=0)),
    "a position behind": lambda: read(verdict(position=2)),
    "a position ahead": lambda: read(verdict(position=4)),
    "an id past the vocabulary": lambda: read(verdict(tokens=[7, 8, VOCAB])),
    "the largest id": lambda: read(verdict(tokens=[7, 8, 2**32 - 1])),
    "a million tokens": lambda: read(verdict(tokens=[7] * 1_000_000)),
    "more than was wanted": lambda: read(plain(9, 9, position=22), reader(tokens=19)),
    "accepted without end": lambda: read(verdict(accepted=2**31)),
    "more accepted than tokens": lambda: read(verdict(accepted=4)),
    "more accepted than checked": lambda: read(verdict(accepted=3, proposed=2)),
    "more of its own than one": lambda: read(verdict(accepted=1)),
    "checked without end": lambda: read(verdict(proposed=2**31, nodes=2**31)),
    "more checked than guessed": lambda: read(verdict(proposed=GUESSED + 1, nodes=GUESSED + 1)),
    "more nodes than there may be": lambda: read(verdict(nodes=2**32 - 1)),
    "more left than guessed": lambda: read(verdict(remaining_depth=GUESSED)),
    "beside without end": lambda: read(verdict(accepted_from_branch=3)),
    "a kind that there is not": lambda: read(verdict(last=77)),
    "no kind": lambda: read(verdict(last=TokenKind.NONE)),
    "accepted as the last": lambda: read(verdict(last=TokenKind.ACCEPTED)),
    "plain after guesses": lambda: read(verdict(last=TokenKind.PLAIN)),
    "recovered without guesses": lambda: read(plain(9, last=TokenKind.RECOVERED)),
    "a kind for nothing": lambda: read(verdict(tokens=[7, STOP], finish_reason=FinishReason.STOP)),
    "no token of its own and no end": lambda: read(verdict(tokens=[7, 8], last=TokenKind.NONE)),
    "a reason that there is not": lambda: read(verdict(finish_reason=99)),
    "cancelled": lambda: read(verdict(finish_reason=FinishReason.CANCELLED)),
    "stopped without a stop": lambda: read(verdict(finish_reason=FinishReason.STOP)),
    "on past a stop": lambda: read(verdict(tokens=[7, EOS, 9])),
    "on after a stop": lambda: read(plain(STOP)),
    "over too soon": lambda: read(verdict(finish_reason=FinishReason.LENGTH)),
    "not over": lambda: read(plain(9, position=22), reader(tokens=19)),
    "a drafter that there is not": lambda: read(verdict(sources=[verify.SourceTally(source=2)])),
    "a drafter of number none": lambda: read(verdict(sources=[verify.SourceTally(source=0)])),
    "many drafters": lambda: read(verdict(sources=[verify.SourceTally(source=1)] * 100_000)),
    "a tally without end": lambda: read(
        verdict(sources=[verify.SourceTally(source=1, proposed=4, accepted=2**32 - 1)])
    ),
    "logprobs unasked": lambda: read(verdict(logprobs=[entry()] * 3)),
    "no logprobs": lambda: read(verdict(), reader(logprobs=2)),
    "too few logprobs": lambda: read(verdict(logprobs=[entry()] * 2), reader(logprobs=2)),
    "too many alternatives": lambda: read(verdict(logprobs=[entry(ids=1000)] * 3), reader(logprobs=2)),
    "an alternative past the vocabulary": lambda: read(
        verdict(logprobs=[verify.TokenLogprobs(logprob=-1, top_ids=[1, VOCAB], top_logprobs=[-1, -1])] * 3),
        reader(logprobs=2),
    ),
    "NaN": lambda: read(verdict(logprobs=[entry(float("nan"))] * 3), reader(logprobs=2)),
    "infinity": lambda: read(verdict(logprobs=[entry(top=float("-inf"))] * 3), reader(logprobs=2)),
    "more than certain": lambda: read(verdict(logprobs=[entry(0.5)] * 3), reader(logprobs=2)),
    "hidden states unasked": lambda: read(
        verdict(hidden_states=common.HiddenStates(position=4, width=4, rows=b"x" * 8)), reader(features=False)
    ),
    "hidden states of no width": lambda: read(
        verdict(hidden_states=common.HiddenStates(position=5, width=0, rows=b"x" * 8))
    ),
    "half a hidden state": lambda: read(verdict(hidden_states=common.HiddenStates(position=4, width=4, rows=b"x" * 9))),
    "hidden states without end": lambda: read(
        verdict(hidden_states=common.HiddenStates(position=5, width=1, rows=b"x" * 10**6))
    ),
    "hidden states from elsewhere": lambda: read(
        verdict(hidden_states=common.HiddenStates(position=9, width=4, rows=b"x" * 24))
    ),
    "rows without end": lambda: read(verdict(timings=verify.VerifyTimings(batch_tokens=2**32 - 1))),
    "more from the cache than there is": lambda: read(verdict(timings=verify.VerifyTimings(cached_tokens=4))),
    "a megabyte that is not known here": lambda: read(
        verify.Verdict.FromString(verdict().SerializeToString() + b"\xfa\x07\xc0\x84\x3d" + b"x" * 1_000_000)
    ),
}


@pytest.mark.parametrize("kind", HONEST)
def test_what_an_honest_verifier_says_is_taken(kind: str) -> None:
    HONEST[kind]()


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_no_honest_verifier_says_is_a_violation(kind: str) -> None:
    with pytest.raises(ProtocolViolation) as found:
        HOSTILE[kind]()
    assert len(found.value.message) < 600


def test_a_verdict_says_no_more_time_than_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: began)
    at = reader()
    endless = verify.VerifyTimings(wait_us=2**32 - 1, step_us=2**32 - 1)
    timings = at.verdict(verdict(timings=endless), began + 0.5).timings
    assert timings.step_us == pytest.approx(500_000, rel=0.1)
    assert timings.wait_us == 0


def opened(**fields: Any) -> verify.Opened:
    model = common.ModelInfo(fingerprint="fingerprint", eos_token_ids=[EOS])
    return verify.Opened(**({"position": 3, "model": model} | fields))


def test_a_session_is_opened_where_it_is_and_with_the_target() -> None:
    reader().check_opened(opened())
    for wrong in (
        opened(position=4),
        opened(model=common.ModelInfo(fingerprint="other", eos_token_ids=[EOS])),
        opened(model=common.ModelInfo(fingerprint="fingerprint", eos_token_ids=[1])),
        opened(model=common.ModelInfo(fingerprint="fingerprint", eos_token_ids=[EOS], name="x" * 1_000_000)),
        verify.Opened(),
    ):
        with pytest.raises(ProtocolViolation):
            reader().check_opened(wrong)


@pytest.mark.parametrize("identity", ["fingerprint", "weights"])
def test_only_in_a_mixed_fleet_equal_weights_are_enough(identity: str) -> None:
    record = SessionRecord("s", SessionRequest(PROMPT, SamplingParams(seed=1)), model=identity)
    target = replace(TARGET, weights_digest="weights")
    at = VerdictReader(record, target, SentMessages(), time.monotonic())
    model = common.ModelInfo(fingerprint="of another engine", weights_digest="weights", eos_token_ids=[EOS])
    if identity == "weights":
        at.check_opened(opened(model=model))
    else:
        with pytest.raises(ProtocolViolation, match=r"opened\.model"):
            at.check_opened(opened(model=model))


def test_one_refusal_per_message_and_no_long_ones() -> None:
    at = reader()
    refused = verify.VerifyReply(source=1, refused=common.Error(code="invalid_request", message="x" * 5_000))
    assert len(at.refusal(refused).error.message) < 300
    with pytest.raises(ProtocolViolation, match="one for each"):
        at.refusal(refused)
    with pytest.raises(ProtocolViolation):
        reader().refusal(verify.VerifyReply(refused=common.Error(message="x" * 1_000_000)))


numbers = st.one_of(st.integers(0, 6), st.integers(0, 2**32 - 1))
some = st.fixed_dictionaries(
    {},
    optional={
        "position": st.one_of(st.just(3), numbers),
        "tokens": st.lists(st.one_of(st.integers(0, VOCAB), numbers), max_size=70),
        "accepted": numbers,
        "last": st.integers(0, 6),
        "proposed": numbers,
        "finish_reason": st.integers(0, 5),
        "nodes": numbers,
        "remaining_depth": numbers,
        "accepted_from_branch": numbers,
        "sources": st.lists(
            st.builds(verify.SourceTally, source=numbers, proposed=numbers, accepted=numbers), max_size=3
        ),
        "logprobs": st.lists(
            st.builds(
                verify.TokenLogprobs,
                logprob=st.floats(),
                top_ids=st.lists(numbers, max_size=4),
                top_logprobs=st.lists(st.floats(), max_size=4),
            ),
            max_size=4,
        ),
        "hidden_states": st.builds(common.HiddenStates, position=numbers, width=numbers, rows=st.binary(max_size=40)),
        "timings": st.builds(
            verify.VerifyTimings,
            wait_us=numbers,
            step_us=numbers,
            sessions=numbers,
            batch_tokens=numbers,
            session_tokens=numbers,
        ),
    },
)


@settings(max_examples=400, deadline=None)
@given(fields=some, logprobs=st.one_of(st.none(), st.integers(0, 3)))
def test_any_verdict_is_read_or_a_violation(fields: dict[str, Any], logprobs: int | None) -> None:
    at = reader(logprobs=logprobs)
    try:
        found = read(verdict(**fields), at)
    except ProtocolViolation:
        return
    assert found.position == 3
    assert 1 <= len(found.tokens) <= 20
    assert max(found.tokens) < VOCAB
    assert len(found.kinds) == len(found.tokens)


def test_guesses_of_a_drafter_in_the_verifiers_process_need_no_message() -> None:
    record = SessionRecord("s", SessionRequest(PROMPT, SamplingParams(seed=1, max_tokens=20)))
    sent = SentMessages(sources=1)
    with pytest.raises(ProtocolViolation):
        read(verdict(), VerdictReader(record, TARGET, sent, time.monotonic() - 1))
    sent.direct = True
    timings = verify.VerifyTimings(wait_us=500, draft_us=900, batch_tokens=5, session_tokens=5)
    found = read(verdict(timings=timings), VerdictReader(record, TARGET, sent, time.monotonic() - 1))
    assert found.proposed == 4
    assert found.timings.draft_us == 500, "drafting is a part of the wait"


@pytest.mark.parametrize(
    "entries",
    [{"sources": [verify.SourceTally()] * 30_000}, {"logprobs": [verify.TokenLogprobs()] * 30_000}],
    ids=["sources", "logprobs"],
)
def test_entries_are_counted_before_conversion(entries: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their conversion takes the event loop from all sessions."""
    monkeypatch.delattr(convert, "verdict_from_proto")
    with pytest.raises(ProtocolViolation):
        read(verdict(**entries))


def test_time_is_accounted_for_once() -> None:
    """A verifier that reports more than there was would make guesses look cheap, or plain steps dear."""
    at, began = reader(), time.monotonic()
    for position, seconds in ((3, 1.0), (6, 1.5)):
        times = verify.VerifyTimings(step_us=10**9, sessions=1, batch_tokens=5, session_tokens=5, step_tokens=3)
        found = at.verdict(verdict(position=position, timings=times), began + seconds)
        at._record.append(found.tokens, found.kinds, ())
    assert found.timings.step_us == pytest.approx(500_000, rel=0.1)
