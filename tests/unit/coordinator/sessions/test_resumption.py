"""What has ended is finished: every kind of end, found in the tokens of a record that does not note it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, cast

import pytest

from coordinator.persistence.session_record import SessionRecord, SessionRequest, pack_logprobs, unpack_logprobs
from coordinator.sessions.resumption import append_tail, finish_ended
from coordinator.workers.target import Target
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import Conflict, InvalidRequest
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import Grammar, SamplingParams, Verification
from outrider.protocol.speculation import FinishReason, TokenKind, TokenLogprobs
from outrider.protocol.vocabulary import Vocabulary
from outrider.speculation.grammar import GrammarCompiler
from outrider.testing.toy_models import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = cast(int, TOKENIZER.eos_token_id)
REJECTION = SamplingParams(seed=1, verification=Verification.REJECTION, max_tokens=40)


@pytest.fixture(scope="module")
def target() -> Target:
    info = ModelInfo(
        name="tiny",
        fingerprint="f",
        architecture="a",
        vocab_size=len(TOKENIZER),
        vocabulary_digest="d",
        context_length=2048,
        eos_token_ids=(EOS,),
    )
    return Target(
        info, TOKENIZER, Vocabulary.of(TOKENIZER), GrammarCompiler(partial(tokenizer_json, TOKENIZER), (EOS,))
    )


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def record_of(tokens: list[int], **params: Any) -> SessionRecord:
    request = SessionRequest(tuple(tokens_of("Say it.")), SamplingParams(**({"seed": 1, "max_tokens": 40} | params)))
    return SessionRecord("s", request, tokens=tokens, kinds=[TokenKind.PLAIN] * len(tokens))


ENDS: list[tuple[str, dict[str, Any], list[int], int, FinishReason]] = [
    ("a stop id", {"stop_token_ids": (tokens_of("!")[0],)}, tokens_of("yes! and on"), 4, FinishReason.STOP),
    ("the end token", {}, [*tokens_of("yes"), EOS, *tokens_of("no")], 4, FinishReason.STOP),
    ("a stop string", {"stop": ("s a",)}, tokens_of("yes and on"), 5, FinishReason.STOP),
    ("max_tokens", {"max_tokens": 6}, tokens_of("yes and on"), 6, FinishReason.LENGTH),
    ("a stop at max_tokens", {"max_tokens": 3, "stop": ("s",)}, tokens_of("yes"), 3, FinishReason.STOP),
    ("a grammar", {"grammar": Grammar(regex="[a-z]{3}")}, tokens_of("yes"), 3, FinishReason.STOP),
    (
        "a grammar's end token",
        {"grammar": Grammar(regex="[a-z]+"), "ignore_eos": True},
        [*tokens_of("yes"), EOS],
        4,
        FinishReason.STOP,
    ),
    ("nothing yet", {"stop": ("no",), "stop_token_ids": (1,)}, tokens_of("yes and on"), 10, FinishReason.NONE),
    ("an end token to be ignored", {"ignore_eos": True}, [EOS, EOS, 5], 3, FinishReason.NONE),
]


@pytest.mark.parametrize(("params", "tokens", "length", "reason"), [end[1:] for end in ENDS], ids=[e[0] for e in ENDS])
async def test_what_has_ended_is_finished(
    target: Target, params: dict[str, Any], tokens: list[int], length: int, reason: FinishReason
) -> None:
    record = record_of(list(tokens), **params)
    await finish_ended(record, target)
    assert record.finish_reason is reason
    assert record.tokens == tokens[:length]
    assert len(record.kinds) == length


async def test_tokens_that_a_grammar_does_not_allow_are_refused(target: Target) -> None:
    with pytest.raises(InvalidRequest):
        await finish_ended(record_of(tokens_of("YES"), grammar=Grammar(regex="[a-z]+")), target)


@pytest.mark.parametrize("mode", [Verification.GREEDY, Verification.COUPLED])
def test_what_can_be_made_again_is_not_taken_from_a_client(target: Target, mode: Verification) -> None:
    record = record_of([1, 2], verification=mode, temperature=0.0 if mode is Verification.GREEDY else 1.0)
    append_tail(record, 4, (9, 9, 9, 9), target, closed=False)
    assert record.tokens == [1, 2]


def test_what_cannot_be_made_again_is(target: Target) -> None:
    record = record_of([1, 2, 3], verification=Verification.REJECTION, logprobs=0)
    append_tail(record, 5, (2, 3, 4, 5), target, closed=False)
    assert record.tokens == [1, 2, 3, 4, 5]
    assert len(record.logprobs) == 2
    append_tail(record, 3, (3,), target, closed=False)
    assert record.tokens == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("position", "tail", "error"),
    [
        (5, (9, 3, 4, 5), Conflict),  # other words than those that are known
        (2, (7,), Conflict),
        (5, (5,), Conflict),  # too few
        (2, (1, 2, 3), InvalidRequest),  # more than there can be before that position
        (4, (60_000,), InvalidRequest),
    ],
)
def test_a_tail_that_cannot_be_is_refused(
    target: Target, position: int, tail: tuple[int, ...], error: type[Exception]
) -> None:
    record = record_of([1, 2, 3], verification=Verification.BLOCK)
    with pytest.raises(error):
        append_tail(record, position, tail, target, closed=False)
    assert record.tokens == [1, 2, 3]


def test_logprobs_are_kept_exactly() -> None:
    entries = [
        TokenLogprobs(-0.1234567890123, (5, 7), (-0.1234567890123, -2.5)),
        None,
        TokenLogprobs(float("-inf"), (9,), (-1e-9,)),
        TokenLogprobs(-3.25),
    ]
    assert unpack_logprobs(pack_logprobs(entries, 2), 2) == entries
    assert unpack_logprobs(pack_logprobs(entries, 2) + bytes(5), 2) == entries, "half an entry is none"
    assert len(pack_logprobs([TokenLogprobs(-1.0)], 0)) == 9


def test_a_record_of_the_release_before_reads() -> None:
    """It knows no tenant and no logprobs; a drawn seed leaves no mark."""
    request = SessionRequest((1,), SamplingParams(seed=3), drawn_seed=True)
    assert "drawn_seed" not in json.loads(request.to_json())
    read = SessionRequest.from_json(request.to_json())
    assert (read.prompt, read.params.seed, read.drawn_seed) == ((1,), 3, False)
