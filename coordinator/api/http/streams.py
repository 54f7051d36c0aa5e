"""Responses: whole ones, and server-sent events from a generator that is closed with the response."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from coordinator.api.http.failures import body_of
from outrider.security.error_interceptor import as_outrider_error

DONE = b"data: [DONE]\n\n"
_TOKEN_DEPTH = 5  # of what an answer tells of one token
_text = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class WholeAnswer(JSONResponse):
    """Response that is encoded in parts. Other threads wait for the encoder: 0.1 s for 4,096 log probabilities."""

    def render(self, content: Any) -> bytes:
        return "".join(_parts(content, _TOKEN_DEPTH)).encode()


def _parts(value: Any, depth: int) -> Iterator[str]:
    if not depth or not value or not isinstance(value, dict | list):
        yield value.text if isinstance(value, Encoded) else _text(value)
        return
    named = isinstance(value, dict)
    for mark, each in zip(chain("{" if named else "[", repeat(",")), value, strict=False):
        yield f"{mark}{_text(each)}:" if named else mark
        yield from _parts(value[each] if named else each, depth - 1)
    yield "}" if named else "]"


class Encoded:
    """A value as JSON, encoded once for all events that have it."""

    def __init__(self, value: Any) -> None:
        self.text = "".join(_parts(value, 1))


class EventStream(Response):
    """Response of server-sent events. `start` waits for the first event, so that earlier errors have a status."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[dict[str, Any], None], *, typed: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._typed = typed  # such events name their last one

    @classmethod
    async def start(cls, events: AsyncGenerator[dict[str, Any], None], *, typed: bool = False) -> EventStream:
        try:
            return cls(_event(await anext(events)), events, typed=typed)
        except BaseException:
            await events.aclose()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await write(self._first)
            try:
                async for event in events:
                    await write(_event(event))
            except Exception as error:
                await write(_event(body_of(as_outrider_error(error))))
            await write(b"" if self._typed else DONE, more=False)


def _event(data: Mapping[str, Any]) -> bytes:
    """Return an event; for none, a comment, so that the client and proxies do not take the stream for broken."""
    if not data:
        return b": ping\n\n"
    name = b"event: " + data["type"].encode() + b"\n" if "type" in data else b""
    # Some clients take these for ends of a line.
    text = "".join(_parts(data, _TOKEN_DEPTH + 1)) if "output_index" in data or "response" in data else _text(data)
    text = text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return name + b"data: " + text.encode() + b"\n\n"
