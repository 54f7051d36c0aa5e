"""Replies of `/v1/responses`, and their types: events of a stream, of which the last has the whole response."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from coordinator.admission.model_limits import limits_of
from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.parser import Parser, Part, PartKind
from coordinator.api.http.agents.replies import chat_input, logprobs_of
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.agents.truncation import fitted
from coordinator.api.http.answer import SILENCE_S, progress
from coordinator.api.http.failures import body_of
from coordinator.api.http.replies import Answering, call_id, metrics, reason_of, usage
from coordinator.api.http.responses import AnswerMetrics, CompletionDetails, ContentLogprob, PromptDetails
from coordinator.api.http.streams import Encoded
from coordinator.api.preprocess import ClientRequest
from coordinator.sessions.output import Token
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.protocol.errors import OutriderError
from outrider.settings.coordinator import CoordinatorSettings

Json = dict[str, Any]

_FIELDS = {  # of responses, by their names in gRPC
    "params.grammar": "text.format",
    "params.max_tokens": "max_output_tokens",
    "chat.messages": "input",
    "prompt": "input",
}
_GIVEN = {"instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "text", "tool_choice", "tools"}
_GIVEN |= {"top_logprobs", "truncation"}  # fields of the request that the response repeats
_TEXT: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_THOUGHT: Json = {"type": "reasoning_text", "text": ""}
# By the kind of a part: the prefix of an item's id, its events, the item as it begins, and the part that it has.
_ITEMS: dict[PartKind, tuple[str, str, Json, Json]] = {
    PartKind.CONTENT: ("msg", "output_text", {"type": "message", "role": "assistant", "content": []}, _TEXT),
    PartKind.REASONING: ("rs", "reasoning_text", {"type": "reasoning", "summary": [], "content": []}, _THOUGHT),
    PartKind.CALL: ("fc", "function_call_arguments", {"type": "function_call", "arguments": ""}, {}),
}


class ItemPart(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ContentLogprob]]


class OutputItem(TypedDict):
    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Annotated[Literal["assistant"], Field(description="Of a message.")]]
    content: NotRequired[Annotated[list[ItemPart], Field(description="Of a message or reasoning: one part.")]]
    summary: NotRequired[Annotated[list[Any], Field(description="Of reasoning: empty.")]]
    call_id: NotRequired[Annotated[str, Field(description="Of a call, for the item with its output.")]]
    name: NotRequired[Annotated[str, Field(description="Of a call.")]]
    namespace: NotRequired[Annotated[str, Field(description="Of a call, if its tool is in one.")]]
    arguments: NotRequired[Annotated[str, Field(description="Of a call: a JSON object.")]]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ModelResponse(TypedDict):
    """One answer. It repeats the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: Annotated[dict[str, str] | None, Field(description="With code and message, where it failed.")]
    incomplete_details: Annotated[dict[str, str] | None, Field(description="With reason max_output_tokens.")]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any] | None
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    metrics: NotRequired[AnswerMetrics]


class ModelResponseEvent(TypedDict):
    """One event of a stream. Its type says which fields it has, as OpenAI documents them."""

    type: str
    sequence_number: int
    response: NotRequired[ModelResponse]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[int]
    part: NotRequired[ItemPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[ContentLogprob]]
    name: NotRequired[str]
    arguments: NotRequired[str]


def plan_response(
    body: ResponsesBody, chat: ChatBody, target: Target, settings: CoordinatorSettings
) -> tuple[list[ClientRequest], ResponseReplies]:
    """Return the input of a response, and the formatter of its replies."""
    plan = partial(chat_input, target=target, settings=settings, names=_FIELDS)
    context, limit = limits_of(settings, target).context_of(target), settings.max_prompt_kib * 1024
    room = min(limit, context - min(chat.limit or settings.default_chat_tokens, context // 4))
    request, [parser] = fitted(chat, plan, target, limit, room) if body.truncation == "auto" else plan(chat)
    return [request], ResponseReplies(body, target, parser)


class ResponseReplies:
    """Formatter of the reply to one request, whole and in events."""

    def __init__(self, body: ResponsesBody, target: Target, parser: Parser) -> None:
        given = {name: ResponsesBody.model_fields[name].default for name in _GIVEN}
        given |= body.model_dump(include=_GIVEN, exclude_none=True, by_alias=True)
        given["tools"] = [tool for tool in given["tools"] if "name" in tool]
        given["text"] = {"format": {"type": "text"}} | (given["text"] or {})
        self._given = {name: Encoded(value) for name, value in given.items()}  # three events have it
        self._names = {tool.name: named for tool, named in body.functions}  # of calls, by what the target is told
        self._parser = parser
        self._created = int(time.time())
        self._items: list[Json] = []
        self._kind: PartKind | None = None  # of the item that is open
        self._begun: Json = {}  # its part, or the call itself, to which text is added
        self._target, self._by_token = target, bool(body.chat.logprobs)
        self._known: list[Encoded] = []  # log probabilities of the text of the open item
        self._next: list[Encoded] = []  # of tokens since then, which may belong to text that is still to come

    async def whole(self, answering: Answering, made: Callable[[Json], Any] = dict) -> Any:
        async with answering as sessions, contextlib.aclosing(self._events(sessions[0])) as events:
            *_, last = [event async for event in events if "response" in event]
        return made(last["response"])

    async def chunks(self, answering: Answering) -> AsyncGenerator[Json, None]:
        begun, number = False, 0
        async with answering as sessions, contextlib.aclosing(self._events(sessions[0])) as events:
            try:
                async for event in events:
                    yield event and event | {"sequence_number": number}
                    begun, number = True, number + bool(event)
            except OutriderError as error:
                if not begun:
                    raise  # it gets a status of its own
                response = self._response(sessions[0], "failed", [])
                said = body_of(error)["error"]
                response["error"] = {"code": said["code"] or said["type"], "message": said["message"]}
                yield {"type": "response.failed", "response": response, "sequence_number": number}

    async def _events(self, session: Session) -> AsyncGenerator[Json, None]:
        names = ["created", "in_progress"]
        async with contextlib.aclosing(progress([session], SILENCE_S)) as updates:
            async for choice, tokens in updates:
                if choice < 0:
                    yield {}
                    continue
                while names:
                    yield {"type": f"response.{names.pop(0)}", "response": self._response(session, "in_progress", [])}
                for some in [[token] for token in tokens] * self._by_token or [tokens]:
                    for event in self._read(session, some):
                        yield event
        status = "incomplete" if reason_of(session) == "length" else "completed"
        for event in self._end(session, status):
            yield event
        response = self._response(session, status, self._items) | metrics([session])
        used = usage([session], 1).items()
        response["usage"] = {name.replace("prompt", "input").replace("completion", "output"): it for name, it in used}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield {"type": f"response.{status}", "response": response}

    def _response(self, session: Session, status: str, output: list[Any]) -> Json:
        return {
            "id": f"resp_{session.record.session_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": session.target.served_name,
            "output": output,
            "usage": None,
            "previous_response_id": None,
            "store": False,
            "temperature": session.record.request.params.temperature,
            "top_p": session.record.request.params.top_p,
            **self._given,
        }

    def _read(self, session: Session, tokens: Sequence[Token]) -> Iterator[Json]:
        """Add new parts. The log probabilities of other parts, and of the marks around them, are left out."""
        parser, marked = self._parser, any(it.token in self._parser.marks for it in tokens)
        thought = parser.is_thinking()
        parts = parser.read(session, tokens, ended=not tokens)
        self._next += map(Encoded, logprobs_of(tokens, self._target))
        spoken = any(part.kind is PartKind.CONTENT for part in parts)
        if not spoken and (parts or marked or thought or parser.is_thinking()):
            self._next.clear()
        rest = self._next and not tokens and self._kind in (None, PartKind.CONTENT)
        for part in parts or [Part(PartKind.CONTENT, "")] * bool(rest):
            yield from self._add(session, part)

    def _add(self, session: Session, part: Part) -> Iterator[Json]:
        if part.kind is PartKind.CALL or part.kind not in (PartKind.ARGUMENTS, self._kind):
            yield from self._begin(session, part)
        if part.kind is not PartKind.CALL:
            self._begun["arguments" if part.kind is PartKind.ARGUMENTS else "text"] += part.text
            more: Json = {}
            if part.kind is PartKind.CONTENT:
                more, self._next = {"logprobs": self._next}, []
                self._known += more["logprobs"]
            yield self._event(f"{self._name}.delta", delta=part.text, **more)

    def _end(self, session: Session, status: str) -> Iterator[Json]:
        """End the open item, a call as complete unless it was cut. An answer without any has an empty message."""
        if not self._items:
            yield from self._begin(session, Part(PartKind.CONTENT, ""))
        called = "completed" if self._kind is PartKind.CALL else status
        yield from self._close("incomplete" if self._parser.cut else called)

    def _begin(self, session: Session, begun: Part) -> Iterator[Json]:
        yield from self._close("completed")
        self._kind, number = begun.kind, len(self._items)
        prefix, self._name, item, part = _ITEMS[begun.kind]
        item = item | {"id": f"{prefix}_{session.record.session_id}_{number}", "status": "in_progress"}
        if begun.kind is PartKind.CALL:
            item |= {"call_id": call_id(session, number), **self._names[begun.text]}
        self._items.append(item)
        self._begun, self._known = {**part} or item, []
        yield {"type": "response.output_item.added", "output_index": number, "item": {**item}}
        if part:
            item["content"] = [self._begun]
            yield self._event("content_part.added", part=part)

    def _close(self, status: str) -> Iterator[Json]:
        if self._kind is None:
            return
        item = self._items[-1]
        item["status"] = status
        if self._known:
            self._begun["logprobs"] = Encoded(self._known)
        told = ("name", "arguments", "text", "logprobs")
        yield self._event(f"{self._name}.done", **{name: self._begun[name] for name in told if name in self._begun})
        if self._begun is not item:
            yield self._event("content_part.done", part=self._begun)
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}
        self._kind = None

    def _event(self, event: str, **fields: Any) -> Json:
        place = {} if self._begun is self._items[-1] else {"content_index": 0}
        at = {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"], **place}
        return {"type": f"response.{event}", **at, **fields}
