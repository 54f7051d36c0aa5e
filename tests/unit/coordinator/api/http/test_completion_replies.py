"""Replies to completions that echo their prompts: the text as it was sent, and offsets that fit it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import AddedToken, normalizers

from coordinator.api.http.agents import prompt_logprobs
from coordinator.api.http.bodies import CompletionBody
from coordinator.api.http.replies import CompletionReplies
from coordinator.persistence.session_record import SessionRequest
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.output import MAX_READ, SessionOutput, Token
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason, TokenKind, TokenLogprobs
from outrider.protocol.vocabulary import Vocabulary
from outrider.testing.toy_models import EOS, byte_tokenizer

MARK = "<|mark|>"
ANSWER = " Yes."
PROMPTS = [f"{MARK}A{EOS}{EOS}B{MARK}", "plain é", EOS]


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(MARK)]})
    info: Any = SimpleNamespace(name="toy", fingerprint="fp", eos_token_ids=(tokenizer.eos_token_id,))
    nothing: Any = None
    return Target(info, tokenizer, Vocabulary.of(tokenizer), nothing)


def target_that_composes(target: Target) -> Target:
    """Return the target with a tokenizer that composes characters, as Qwen's does."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return replace(target, tokenizer=tokenizer, vocabulary=Vocabulary.of(tokenizer))


def session(target: Target, prompt: tuple[int, ...], tokens: Sequence[int], stops: Sequence[str] = ()) -> Session:
    output = SessionOutput(TextStream(target.decode, prompt, stops))
    output.append(tokens, [TokenKind.PLAIN] * len(tokens))
    output.end(finished=True)
    record = SimpleNamespace(session_id="s", request=request(prompt), tokens=tokens, finish_reason=FinishReason.LENGTH)
    stats = SimpleNamespace(cached_tokens=0)
    return cast(Session, SimpleNamespace(target=target, record=record, output=output, error=None, stats=stats))


def request(prompt: tuple[int, ...]) -> SessionRequest:
    return SessionRequest(prompt, SamplingParams(logprobs=0, seed=1))


async def replied(
    target: Target, body: CompletionBody, prompts: Any = None, answer: Sequence[int] = ()
) -> list[tuple[str, list[int]]]:
    """Return the text and the offsets of each choice, which are the same whole and in chunks."""
    answered = [target.encode(each) if isinstance(each, str) else tuple(each) for each in body.prompts]
    answer = answer or target.encode(ANSWER)
    sessions = [session(target, prompt, answer, body.stop or ()) for prompt in answered for _ in range(body.choices)]

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[Sequence[Session]]:
        yield sessions

    def replies() -> CompletionReplies:
        made = CompletionReplies(body, target)
        made.prompts = prompts or {}
        return made

    texts: dict[int, str] = defaultdict(str)
    offsets: dict[int, list[int]] = defaultdict(list)
    async for chunk in replies().chunks(answering()):
        for part in chunk["choices"]:
            texts[part["index"]] += part["text"]
            offsets[part["index"]] += part["logprobs"]["text_offset"] if part["logprobs"] else []
    whole = (await replies().whole(answering()))["choices"]
    told = [(each["text"], each["logprobs"]["text_offset"] if each["logprobs"] else []) for each in whole]
    assert told == [(texts[number], offsets[number]) for number in range(len(sessions))]
    return told


def test_the_drawn_token_is_among_the_likeliest_whatever_they_are(target: Target) -> None:
    """Of ids with the same text the drawn one counts, or else the likeliest."""
    body = CompletionBody(prompt="x", logprobs=2)
    a, b, c = target.encode("abc")
    entry = TokenLogprobs(-5.0, (b, c), (-0.5, -1.5))
    tokens = [Token(a, TokenKind.PLAIN, "a", entry), Token(b, TokenKind.PLAIN, "b", entry)]
    logprobs = CompletionReplies(body, target)._logprobs(tokens, 0)
    assert logprobs is not None
    assert logprobs["top_logprobs"] == [{"a": -5.0, "b": -0.5, "c": -1.5}, {"b": -5.0, "c": -1.5}]
    doubled = replace(entry, top_ids=(c, b, b), top_logprobs=(-0.1, -0.5, -2.5))
    told = CompletionReplies(body, target)._logprobs([Token(a, TokenKind.PLAIN, "a", doubled)], 0)
    assert told is not None
    assert told["top_logprobs"] == [{"a": -5.0, "b": -0.5, "c": -0.1}]


async def test_an_echo_is_the_prompt_as_it_was_sent(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    body = CompletionBody.model_validate({"prompt": PROMPTS, "n": 2, "echo": True})
    texts = [text for text, _ in await replied(target, body, await prompts_of(target, body, monkeypatch))]
    assert texts == [prompt + ANSWER for prompt in PROMPTS for _ in range(2)]


async def test_without_echo_there_is_only_the_answer(target: Target) -> None:
    body = CompletionBody.model_validate({"prompt": PROMPTS})
    assert await replied(target, body) == [(ANSWER, [])] * len(PROMPTS)


async def test_tokens_are_echoed_as_text(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    body = CompletionBody.model_validate({"prompt": [list(target.encode(text)) for text in ("One", "é")], "echo": True})
    prompts = await prompts_of(target, body, monkeypatch)
    assert [text for text, _ in await replied(target, body, prompts)] == ["One" + ANSWER, "é" + ANSWER]


async def prompts_of(target: Target, body: CompletionBody, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the tokens of the body's prompts as the target would write them."""
    encoded = [target.encode(each) if isinstance(each, str) else tuple(each) for each in body.prompts]

    @contextlib.asynccontextmanager
    async def start(_: Any, parts: Sequence[SessionRequest], *others: Any) -> AsyncIterator[list[Session]]:
        (part,) = parts
        start = len(part.prompt)
        whole = next(each for each in encoded if each[:start] == part.prompt)
        yield [session(target, part.prompt, whole[start : start + part.params.max_tokens])]

    monkeypatch.setattr(prompt_logprobs, "start_answer", start)
    nothing: Any = None
    requests = [request(each) for each in encoded for _ in range(body.choices)]
    return await prompt_logprobs.echoed_prompts(body, nothing, requests, target, "")


async def test_offsets_fit_a_prompt_with_control_tokens(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    body = CompletionBody.model_validate({"prompt": PROMPTS[::2], "echo": True, "logprobs": 0})
    encoded = [target.encode(prompt) for prompt in PROMPTS[::2]]
    prompts = await prompts_of(target, body, monkeypatch)
    for (text, offsets), prompt in zip(await replied(target, body, prompts), encoded, strict=True):
        tokens = target.tokenizer.batch_decode([[token] for token in (*prompt, *target.encode(ANSWER))])
        assert [text[start : start + len(token)] for start, token in zip(offsets, tokens, strict=True)] == tokens


@pytest.mark.parametrize("stop", ["Yes?", "s.!", "es. No", "."])
async def test_offsets_are_those_of_the_tokens_though_stop_strings_hold_text_back(target: Target, stop: str) -> None:
    body = CompletionBody.model_validate({"prompt": ["One", "Two"], "stop": [stop], "logprobs": 0})
    assert await replied(target, body) == [(ANSWER.removesuffix(stop), [0, 1, 2, 3, 4])] * 2


async def test_special_tokens_that_the_text_does_not_have_take_no_room(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a prompt that was sent as tokens."""
    ids = [*target.encode("A"), target.tokenizer.eos_token_id, *target.encode("B")]
    body = CompletionBody.model_validate({"prompt": [ids, ids[-1:]], "echo": True, "logprobs": 0})
    (text, offsets), _ = await replied(target, body, await prompts_of(target, body, monkeypatch))
    assert text == "AB" + ANSWER
    assert offsets[:4] == [0, 1, 1, 2]


@pytest.mark.parametrize("stops", [[], ["x!"]])
async def test_offsets_are_those_of_the_tokens_though_a_character_is_incomplete(
    target: Target, stops: list[str]
) -> None:
    """Its text comes with that of the next token, which begins after it."""
    stray = target.encode("é")[0]
    answer = [*target.encode("a"), stray, *target.encode("x"), *target.encode("€b"), stray, *target.encode("c")]
    body = CompletionBody.model_validate({"prompt": ["One", "Two"], "logprobs": 0, "stop": stops})
    (text, offsets), _ = await replied(target, body, answer=answer)
    assert text == "a\N{REPLACEMENT CHARACTER}x€b\N{REPLACEMENT CHARACTER}c"
    assert offsets == [0, 1, 2, 3, 3, 3, 4, 5, 6], "bytes of one character begin where it begins"


async def test_a_character_after_a_stray_byte_begins_after_it(target: Target) -> None:
    stray = target.encode("é")[0]
    answer = [*target.encode("a"), stray, *target.encode("€!")]
    body = CompletionBody.model_validate({"prompt": ["One", "Two"], "logprobs": 0})
    (text, offsets), _ = await replied(target, body, answer=answer)
    assert text == "a\N{REPLACEMENT CHARACTER}€!"
    assert (offsets[0], offsets[1], offsets[4], offsets[5]) == (0, 1, 2, 3)


async def test_offsets_of_an_answer_fit_the_echo_of_a_text_that_the_tokenizer_changes(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole answers and streams told different ones."""
    composing = target_that_composes(target)
    prompt = "Cafe\N{COMBINING ACUTE ACCENT}"
    body = CompletionBody.model_validate({"prompt": [prompt, "Two"], "echo": True, "logprobs": 0})
    (text, offsets), _ = await replied(composing, body, await prompts_of(composing, body, monkeypatch))
    assert text == prompt + ANSWER
    assert offsets[-len(ANSWER) :] == [text.index(ANSWER) + at for at in range(len(ANSWER))]


async def test_texts_of_the_same_tokens_have_offsets_of_their_own(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a text and its composed form: the offsets of the first one were those of the second one."""
    composing = target_that_composes(target)
    body = CompletionBody.model_validate({"prompt": ["e\N{COMBINING ACUTE ACCENT}", "é"], "echo": True, "logprobs": 0})
    told = await replied(composing, body, await prompts_of(composing, body, monkeypatch))
    for (text, offsets), prompt in zip(told, body.prompts, strict=True):
        assert (text, offsets[-len(ANSWER)]) == (f"{prompt}{ANSWER}", len(prompt))


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_with_a_limit_of_zero_tokens_there_is_the_prompt_alone(
    target: Target, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation harnesses ask so for the log probabilities of texts."""
    given = {"prompt": ["One", "Three"], "n": 2, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    body = CompletionBody.model_validate(given)
    assert body.limit == 1
    prompts = await prompts_of(target, body, monkeypatch)
    told = await replied(target, body, prompts, answer=[*target.encode("a"), target.encode("é")[0]])
    assert [text for text, _ in told] == ["One", "One", "Three", "Three"]
    assert [len(offsets) for _, offsets in told] == ([0] * 4 if logprobs is None else [3, 3, 5, 5])


async def test_a_long_prompt_with_log_probabilities_is_echoed_in_parts_between_which_others_write(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk of 8,000 tokens with 20 log probabilities took a third of a second, in which all streams waited."""
    turns = 0

    async def write() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    text = "a€" * 500
    body = CompletionBody.model_validate({"prompt": [text, text], "echo": True, "logprobs": 0, "stream": True})
    prompts = await prompts_of(target, body, monkeypatch)
    told = await replied(target, body, prompts)
    assert [each for each, _ in told] == [text + ANSWER] * 2

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[Sequence[Session]]:
        yield [session(target, target.encode(text), target.encode(ANSWER)) for _ in range(2)]

    replies = CompletionReplies(body, target)
    replies.prompts, seen, others = prompts, [], asyncio.create_task(write())
    async for chunk in replies.chunks(answering()):
        logprobs = chunk["choices"][0]["logprobs"]
        seen.append((turns, len(logprobs["tokens"]) if logprobs else 0))
    others.cancel()
    assert max(length for _, length in seen) == MAX_READ
    assert len({turn for turn, _ in seen}) > 2 * 4 * 500 / MAX_READ
