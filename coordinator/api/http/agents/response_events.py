"""Replies of `/v1/responses`: typed events of a stream, of which the last has the whole response."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.dialects import Manner
from coordinator.api.http.agents.parser import Part, PartKind
from coordinator.api.http.agents.replies import AnswerReader, call_id, chat_input
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.answer import progress
from coordinator.api.http.failures import body_of
from coordinator.api.http.replies import Answering, metrics, reason_of, usage
from coordinator.api.preprocess import ClientRequest
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
_GIVEN: Json = {  # fields of the request that the response repeats, with what an absent one means
    "instructions": None,
    "max_output_tokens": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}
_TEXT: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_THOUGHT: Json = {"type": "reasoning_text", "text": ""}
# By the kind of a part: the prefix of an item's id, its events, the item as it begins, and the part that it has.
_ITEMS: dict[PartKind, tuple[str, str, Json, Json]] = {
    PartKind.CONTENT: ("msg", "output_text", {"type": "message", "role": "assistant", "content": []}, _TEXT),
    PartKind.REASONING: ("rs", "reasoning_text", {"type": "reasoning", "summary": [], "content": []}, _THOUGHT),
    PartKind.CALL: ("fc", "function_call_arguments", {"type": "function_call", "arguments": ""}, {}),
}


def plan_response(
    body: ResponsesBody, chat: ChatBody, target: Target, settings: CoordinatorSettings
) -> tuple[list[ClientRequest], ResponseReplies]:
    """Return the input of a response, and the formatter of its replies."""
    request, manner = chat_input(chat, target, settings, _FIELDS)
    return [request], ResponseReplies(body, target, manner)


class ResponseReplies:
    """Formatter of the reply to one request, whole and in events."""

    def __init__(self, body: ResponsesBody, target: Target, manner: Manner) -> None:
        given = body.model_dump(include={*_GIVEN}, exclude_none=True, by_alias=True)
        self._given = _GIVEN | given | {"text": _GIVEN["text"] | given.get("text", {})}
        self._model = target.served_name
        self._names = {tool.name: named for tool, named in body.functions}  # of calls, by what the target is told
        self._reader = AnswerReader(body.chat, target, manner)
        self._created = int(time.time())

    async def whole(self, answering: Answering, made: Callable[[Json], Any] = dict) -> Any:
        async with answering as sessions, contextlib.aclosing(self._events(sessions[0])) as events:
            *_, last = [event async for event in events if "response" in event]
        return made(last["response"])

    async def chunks(self, answering: Answering) -> AsyncGenerator[Json, None]:
        number = 0
        async with answering as sessions, contextlib.aclosing(self._events(sessions[0])) as events:
            try:
                async for event in events:
                    yield event | {"sequence_number": number}
                    number += 1
            except OutriderError as error:
                if not number:
                    raise  # it gets a status of its own
                response = self._response(sessions[0], "failed", [])
                said = body_of(error)["error"]
                response["error"] = {"code": said["code"] or said["type"], "message": said["message"]}
                yield {"type": "response.failed", "response": response, "sequence_number": number}

    async def _events(self, session: Session) -> AsyncGenerator[Json, None]:
        output, names = _Output(session, self._names), ["created", "in_progress"]
        async with contextlib.aclosing(progress([session])) as updates:
            async for _, tokens in updates:
                while names:
                    yield {"type": f"response.{names.pop(0)}", "response": self._response(session, "in_progress", [])}
                for part in self._reader.read(session, tokens, ended=not tokens):
                    for event in output.add(part):
                        yield event
        status = "incomplete" if reason_of(session) == "length" else "completed"
        for event in output.end(status, cut=self._reader.parser.cut):
            yield event
        response = self._response(session, status, output.items) | metrics([session])
        used = usage([session], 1).items()
        response["usage"] = {name.replace("prompt", "input").replace("completion", "output"): it for name, it in used}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield {"type": f"response.{status}", "response": response}

    def _response(self, session: Session, status: str, output: list[Any]) -> Json:
        params = session.record.request.params
        return {
            "id": f"resp_{session.record.session_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "usage": None,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "truncation": "disabled",
            **self._given,
        }


class _Output:
    """Items of a response. Each has events for its beginning, its parts and its end."""

    def __init__(self, session: Session, names: Mapping[str, Json]) -> None:
        self.items: list[Json] = []
        self._session, self._names = session, names
        self._kind: PartKind | None = None  # of the item that is open
        self._begun: Json = {}  # the part of this item, or the call, to which text is added

    def add(self, part: Part) -> Iterator[Json]:
        if part.kind is PartKind.CALL or part.kind not in (PartKind.ARGUMENTS, self._kind):
            yield from self._begin(part)
        if part.kind is not PartKind.CALL:
            self._begun["arguments" if part.kind is PartKind.ARGUMENTS else "text"] += part.text
            more: Json = {"logprobs": []} if part.kind is PartKind.CONTENT else {}
            yield self._event(f"{self._name}.delta", delta=part.text, **more)

    def end(self, status: str, *, cut: bool) -> Iterator[Json]:
        """End the open item, a call as complete unless it was cut. An answer without any has an empty message."""
        if not self.items:
            yield from self._begin(Part(PartKind.CONTENT, ""))
        yield from self._close("incomplete" if cut else "completed" if self._kind is PartKind.CALL else status)

    def _begin(self, begun: Part) -> Iterator[Json]:
        yield from self._close("completed")
        self._kind, number = begun.kind, len(self.items)
        prefix, self._name, item, part = _ITEMS[begun.kind]
        item = item | {"id": f"{prefix}_{self._session.record.session_id}_{number}", "status": "in_progress"}
        if begun.kind is PartKind.CALL:
            item |= {"call_id": call_id(self._session, number), **self._names[begun.text]}
        self.items.append(item)
        self._begun = {**part} or item
        yield {"type": "response.output_item.added", "output_index": number, "item": {**item}}
        if part:
            item["content"] = [self._begun]
            yield self._event("content_part.added", part=part)

    def _close(self, status: str) -> Iterator[Json]:
        if self._kind is None:
            return
        item = self.items[-1]
        item["status"] = status
        told = ("name", "arguments", "text", "logprobs")
        yield self._event(f"{self._name}.done", **{name: self._begun[name] for name in told if name in self._begun})
        if self._begun is not item:
            yield self._event("content_part.done", part=self._begun)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._kind = None

    def _event(self, event: str, **fields: Any) -> Json:
        place = {} if self._begun is self.items[-1] else {"content_index": 0}
        at = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"], **place}
        return {"type": f"response.{event}", **at, **fields}
