"""Replies of `/v1/responses`: typed events of a stream, of which the last has the whole response."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.dialects import Manner
from coordinator.api.http.agents.parser import Part, PartKind
from coordinator.api.http.agents.replies import AnswerReader, call_id, chat_input, name_as_sent
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.agents.response_types import ModelResponse
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
# By the kind of a part: the prefix of an item's id, the item as it begins, and the part that it has.
_ITEMS: dict[PartKind, tuple[str, Json, Json]] = {
    PartKind.CONTENT: (
        "msg",
        {"type": "message", "role": "assistant", "content": []},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    PartKind.REASONING: (
        "rs",
        {"type": "reasoning", "summary": [], "content": []},
        {"type": "reasoning_text", "text": ""},
    ),
    PartKind.CALL: ("fc", {"type": "function_call", "arguments": ""}, {}),
}


def plan_response(
    body: ResponsesBody, chat: ChatBody, target: Target, settings: CoordinatorSettings
) -> tuple[list[ClientRequest], ResponseReplies]:
    """Return the input of a response, and the formatter of its replies."""
    name_as_sent(chat, _FIELDS)
    request, manner = chat_input(chat, target, settings)
    return [request], ResponseReplies(body, target, target.served_name, manner)


class ResponseReplies:
    """Formatter of the reply to one request, whole and in events."""

    def __init__(self, body: ResponsesBody, target: Target, model: str, manner: Manner) -> None:
        unread = {"input": "", "chat": None, "text": None, "tools": None}  # each may be megabytes
        self._body = body.model_copy(update=unread)
        self._given = body.model_dump(include={"text", "tool_choice", "tools"}, exclude_none=True, by_alias=True)
        self._model = model
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
        response: Json = {**self._response(session, status, output.items), **metrics([session])}
        used = usage([session], 1).items()
        response["usage"] = {name.replace("prompt", "input").replace("completion", "output"): it for name, it in used}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield {"type": f"response.{status}", "response": response}

    def _response(self, session: Session, status: Any, output: list[Any]) -> ModelResponse:
        body, given = self._body, self._given
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
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": session.record.request.params.temperature,
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": session.record.request.params.top_p,
            "truncation": "disabled",
        }


class _Output:
    """Items of a response. Each has events for its beginning, its parts and its end."""

    def __init__(self, session: Session, names: Mapping[str, Json]) -> None:
        self.items: list[Json] = []
        self._session, self._names = session, names
        self._kind: PartKind | None = None  # of the item that is open

    def add(self, part: Part) -> Iterator[Json]:
        if part.kind is PartKind.ARGUMENTS:
            self.items[-1]["arguments"] += part.text
            yield self._event("function_call_arguments.delta", delta=part.text)
            return
        if part.kind is PartKind.CALL or part.kind is not self._kind:
            yield from self._begin(part)
        if part.kind is not PartKind.CALL:
            self.items[-1]["content"][0]["text"] += part.text
            yield self._text_event("delta", delta=part.text)

    def end(self, status: str, *, cut: bool) -> Iterator[Json]:
        """End the open item, a call as complete unless it was cut. An answer without any has an empty message."""
        if not self.items:
            yield from self._begin(Part(PartKind.CONTENT, ""))
        yield from self._close("incomplete" if cut else "completed" if self._kind is PartKind.CALL else status)

    def _begin(self, begun: Part) -> Iterator[Json]:
        yield from self._close("completed")
        self._kind = begun.kind
        prefix, item, part = _ITEMS[begun.kind]
        number = len(self.items)
        item = item | {"id": f"{prefix}_{self._session.record.session_id}_{number}", "status": "in_progress"}
        if begun.kind is PartKind.CALL:
            item |= {"call_id": call_id(self._session, number), **self._names[begun.text]}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": number, "item": {**item}}
        if part:
            item["content"] = [{**part}]
            yield self._event("content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> Iterator[Json]:
        if self._kind is None:
            return
        item = self.items[-1]
        item["status"] = status
        if self._kind is PartKind.CALL:
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            [part] = item["content"]
            yield self._text_event("done", text=part["text"])
            yield self._event("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._kind = None

    def _text_event(self, what: str, **fields: str) -> Json:
        kind = self.items[-1]["content"][0]["type"]
        more: Json = fields | ({"logprobs": []} if kind == "output_text" else {})
        return self._event(f"{kind}.{what}", content_index=0, **more)

    def _event(self, event: str, **fields: Any) -> Json:
        at = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
        return {"type": f"response.{event}", **at, **fields}
