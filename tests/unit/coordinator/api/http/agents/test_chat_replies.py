"""Chunks of chats as OpenAI's own client adds them up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.calls.forms import HERMES
from coordinator.api.http.agents.manners import TextManner
from coordinator.api.http.agents.replies import ChatReplies
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.output import SessionOutput
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.testing.toy_models import byte_tokenizer

TEXTS = ("zero", "one", "two")


def session_of(target: Target) -> Session:
    record = SimpleNamespace(session_id="s", finish_reason=FinishReason.STOP)
    output = SessionOutput(TextStream(target.decode, (), ()))
    return cast(Session, SimpleNamespace(target=target, record=record, output=output, error=None))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
async def test_each_choice_is_its_own_whichever_begins(order: Sequence[int]) -> None:
    info: Any = SimpleNamespace(fingerprint="fp")
    nothing: Any = None
    target = Target(info, byte_tokenizer(), nothing, nothing)
    sessions = [session_of(target) for _ in TEXTS]
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi."}], "n": 3, "stream": True})

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[Sequence[Session]]:
        yield sessions

    def say(number: int) -> None:
        tokens = target.encode(TEXTS[number])
        sessions[number].output.append(tokens, [TokenKind.PLAIN] * len(tokens))
        sessions[number].output.end(finished=True)

    waiting, state = list(order), ChatCompletionStreamState()
    say(waiting.pop(0))
    async for chunk in ChatReplies(body, target, TextManner(HERMES, True).parsers({}, body, target)).chunks(
        answering()
    ):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
        if waiting and chunk["choices"][0]["finish_reason"]:
            say(waiting.pop(0))
    found = [(choice.index, choice.message.content) for choice in state.get_final_completion().choices]
    assert found == list(enumerate(TEXTS))


@pytest.mark.parametrize(("length", "beside"), [(500, False), (1_500, True)])
async def test_long_answers_are_parsed_beside_the_event_loop(length: int, *, beside: bool) -> None:
    """Reasoning of 8,000 tokens in each of sixteen choices took 0.4 s, in which all streams waited."""
    info: Any = SimpleNamespace(fingerprint="fp")
    nothing: Any = None
    target = Target(info, byte_tokenizer(), nothing, nothing)
    sessions = [session_of(target) for _ in range(2)]
    for session in cast(list[Any], sessions):
        session.record.request = SimpleNamespace(prompt=(1,))
        session.record.tokens = target.encode("x" * length)
        session.stats = SimpleNamespace(cached_tokens=0)
        session.output.append(session.record.tokens, [TokenKind.PLAIN] * length)
        session.output.end(finished=True)

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[Sequence[Session]]:
        yield sessions

    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi."}], "n": 2})
    manner = TextManner(HERMES, True, thinks=True, thinking=True)
    replies = ChatReplies(body, target, manner.parsers({}, body, target))
    answer, thread = await replies.whole(answering(), lambda told: (told, threading.current_thread()))
    assert [each["message"]["reasoning_content"] for each in answer["choices"]] == ["x" * length] * 2
    assert (thread is not threading.current_thread()) is beside
