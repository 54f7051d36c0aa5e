"""Around every request: its size, its id, its key, and its end when the client goes away."""

from __future__ import annotations

import asyncio
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.failures import respond
from outrider.errors import Expired, InvalidRequest, OutriderError, Unauthenticated
from outrider.keys import HEADER, Keys
from outrider.origin import REQUEST_ID, take_up
from outrider.serving import background
from outrider.tenants import act_for

log = structlog.get_logger(__name__)

_GONE = 499
_TOO_LARGE = 413
_TOO_SLOW = 408
_SLOWEST = 10_000  # bytes a second that a body may come with


class RequestIds:
    """Every answer says which request it belongs to, so does every line that is logged for it; faults become 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = take_up(Headers(scope=scope).items(), first=True)
        status, started = 0, time.monotonic()

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = origin.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:
            if status:
                raise  # the answer has begun: only a broken connection can tell
            log.exception("request failed")
            await respond(OutriderError(f"internal error: {type(error).__name__}"))(scope, receive, send_on)
        finally:
            ms = round(1000 * (time.monotonic() - started))
            log.info("http", method=scope["method"], path=scope["path"], status=status or _GONE, ms=ms)


class KeyHolders:
    """Whoever shows no key that opens sees nothing but what is open to all."""

    def __init__(self, app: ASGIApp, keys: Keys, open_to_all: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            holder = self._keys.holder(Headers(scope=scope).get(HEADER))
            if holder is None:
                error = Unauthenticated(f"a valid key is needed here, sent as '{HEADER}: Bearer KEY'", field=HEADER)
                await respond(error)(scope, receive, send)
                return
            act_for(holder)
        await self._app(scope, receive, send)


class WholeBodies:
    """Reads a body to its end before the app does, no further than it may be and no longer than it may take.

    Ends the app when the client leaves.
    """

    def __init__(self, app: ASGIApp, limit: int, patience_s: float) -> None:
        self._app = app
        self._limit = limit
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(receive)
        except TimeoutError:
            slow = Expired(f"the body came slower than {_SLOWEST} bytes a second", field="body")
            reply = respond(slow, _TOO_SLOW)
            reply.headers["Connection"] = "close"
            await reply(scope, receive, send)
            return
        if body is None:
            return  # gone before all was said
        if len(body) > self._limit:
            error = InvalidRequest.of("body", f"more than {self._limit} bytes", f"at most {self._limit} bytes")
            await respond(error, _TOO_LARGE)(scope, receive, send)
            return
        await self._answer(scope, body, receive, send)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        gone = asyncio.Event()
        told = False

        async def heard() -> Message:
            nonlocal told
            if not told:
                told = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue
            gone.set()
            working.cancel()

        working = asyncio.ensure_future(self._app(scope, heard, send))
        async with background(listen()):
            try:
                await working
            except asyncio.CancelledError:
                if not gone.is_set():
                    working.cancel()
                    raise

    async def _read(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            async with asyncio.timeout_at(deadline + size / _SLOWEST):
                message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            parts.append(part)
            if size > self._limit or not message.get("more_body", False):
                return b"".join(parts)
