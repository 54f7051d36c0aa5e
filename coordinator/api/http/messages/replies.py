"""Replies of `/v1/messages`: Anthropic's events of a stream, or the message that they amount to."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from sys import float_info
from typing import Any

from pydantic_core import from_json

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.parser import Parser, Part, PartKind
from coordinator.api.http.agents.replies import chat_input
from coordinator.api.http.answer import SILENCE_S, progress
from coordinator.api.http.messages.types import MessageUsage, ModelMessage
from coordinator.api.http.replies import Answering, call_id, metrics, reason_of, usage
from coordinator.api.preprocess import ClientRequest
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.settings.coordinator import CoordinatorSettings

Json = dict[str, Any]

_FIELDS = {  # of messages, by their names in gRPC
    "params.grammar": "output_config.format",
    "params.stop": "stop_sequences",
    "prompt": "messages",
}
_LARGEST = {"Infinity": float_info.max, "-Infinity": -float_info.max}  # for numbers too large, which JSON may have
# By the kind of a part: its block as it begins, and the delta and the field of it to which text is added.
_BLOCKS: dict[PartKind, tuple[Json, str, str]] = {
    PartKind.CONTENT: ({"type": "text", "text": ""}, "text_delta", "text"),
    PartKind.REASONING: ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    PartKind.CALL: ({"type": "tool_use", "input": {}}, "input_json_delta", "partial_json"),
}


def plan_message(
    chat: ChatBody, target: Target, settings: CoordinatorSettings
) -> tuple[list[ClientRequest], MessageReplies]:
    """Return the input of a message, and the formatter of its replies."""
    request, [parser] = chat_input(chat, target, settings, _FIELDS)
    return [request], MessageReplies(chat, target, parser)


class MessageReplies:
    """Formatter of the reply to one request, whole and in events."""

    def __init__(self, chat: ChatBody, target: Target, parser: Parser) -> None:
        self._model = target.served_name
        self._limit = chat.limit or 0
        self._parser = parser
        self._content: list[Json] = []
        self._kind: PartKind | None = None  # of the block that is open
        self._text = ""  # of it

    async def whole(self, answering: Answering, made: Callable[[Json], Any] = dict) -> Any:
        start, last, _ = [it async for it in self.chunks(answering) if it["type"].startswith("message_")]
        said = last["delta"] | {name: last[name] for name in ("usage", "metrics")}
        return made(start["message"] | {"content": self._content} | said)

    async def chunks(self, answering: Answering) -> AsyncGenerator[Json, None]:
        begun = False
        async with answering as [session], contextlib.aclosing(progress([session], SILENCE_S)) as updates:
            async for number, tokens in updates:
                if number < 0:
                    yield {"type": "ping"}
                    continue
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": self._message(session)}
                    yield {"type": "ping"}
                for part in self._parser.read(session, tokens, ended=not tokens):
                    for event in self._added(session, part):
                        yield event
            for event in self._ended(session):
                yield event
            yield {"type": "message_delta", "delta": self._end(session), "usage": _used(session), **metrics([session])}
            yield {"type": "message_stop"}

    def _message(self, session: Session) -> ModelMessage:
        return {
            "id": f"msg_{session.record.session_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _used(session),
        }

    def _added(self, session: Session, part: Part) -> Iterator[Json]:
        if part.kind is PartKind.CALL or part.kind not in (self._kind, PartKind.ARGUMENTS):
            yield from self._begun(session, part)
        if part.kind is not PartKind.CALL:
            assert self._kind is not None  # arguments follow a call
            _, kind, field = _BLOCKS[self._kind]
            self._text += part.text
            yield self._event("delta", delta={"type": kind, field: part.text})

    def _begun(self, session: Session, part: Part) -> Iterator[Json]:
        yield from self._closed(session)
        self._kind, self._text = part.kind, ""
        block = {**_BLOCKS[part.kind][0]}
        if part.kind is PartKind.CALL:
            block |= {"id": f"toolu_{call_id(session, len(self._content))}", "name": part.text}
        self._content.append(block)
        yield self._event("start", content_block={**block})

    def _closed(self, session: Session) -> Iterator[Json]:
        if self._kind is None:
            return
        block, field = self._content[-1], _BLOCKS[self._kind][2]
        if self._kind is PartKind.CALL:  # if the limit of tokens cut it, with what is whole
            with contextlib.suppress(ValueError):  # none of hundreds of levels, or thousands of digits
                whole = json.dumps(from_json(self._text or "{}", allow_partial=True))
                block["input"] = json.loads(whole, parse_constant=_LARGEST.get)
        else:
            block[field] = self._text
        if self._kind is PartKind.REASONING:  # some clients drop thinking without one
            block["signature"] = session.record.session_id
            yield self._event("delta", delta={"type": "signature_delta", "signature": block["signature"]})
        yield self._event("stop")

    def _ended(self, session: Session) -> Iterator[Json]:
        """Close the last block. An answer without any has an empty text."""
        if not self._content:
            yield from self._begun(session, Part(PartKind.CONTENT, ""))
        yield from self._closed(session)

    def _event(self, what: str, **fields: Any) -> Json:
        return {"type": f"content_block_{what}", "index": len(self._content) - 1, **fields}

    def _end(self, session: Session) -> Json:
        """Return why the answer ended. It has a limit below the one asked for where the context left no more."""
        parser, stop = self._parser, session.output.rest.stop
        if reason_of(session) == "length":
            full = session.record.request.params.max_tokens < self._limit
            reason, stop = "model_context_window_exceeded" if full else "max_tokens", ""
        elif parser.calls and not parser.cut:
            reason, stop = "tool_use", ""
        else:
            reason = "stop_sequence" if stop else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop or None}


def _used(session: Session) -> MessageUsage:
    known = usage([session], 1)
    cached = known["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": known["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": known["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": known["completion_tokens_details"]["reasoning_tokens"]},
    }
