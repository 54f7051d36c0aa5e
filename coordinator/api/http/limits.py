"""Around every request: its size, its id, its key, and its end when the client goes away."""

from __future__ import annotations

import asyncio
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.admission.byte_budget import ByteBudget, ByteShare
from coordinator.api.http.connections import KNOWN
from coordinator.api.http.failures import respond
from outrider.base.aio import background
from outrider.observability.request_context import REQUEST_ID, take_up
from outrider.protocol.errors import Expired, InvalidRequest, OutriderError, Overloaded, Unauthenticated
from outrider.security.api_keys import HEADER, ApiKeys
from outrider.security.tenants import act_for

log = structlog.get_logger(__name__)

_GONE = 499
_TOO_LARGE = 413
_TOO_SLOW = 408
_UNAVAILABLE = 503
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

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_to_all: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            holder = self._keys.holder(Headers(scope=scope).get(HEADER))
            if holder is None and scope["path"] not in self._open:
                error = Unauthenticated(f"a valid key is needed here, sent as '{HEADER}: Bearer KEY'", field=HEADER)
                await respond(error)(scope, receive, send)
                return
            if holder is not None:
                act_for(holder)
                scope[KNOWN] = True
        await self._app(scope, receive, send)


class WholeBodies:
    """Reads a body to its end before the app does, no further than it may be and no longer than it may take.

    Ends the app when the client leaves.
    """

    def __init__(self, app: ASGIApp, limit: int, patience_s: float, budget: ByteBudget) -> None:
        self._app = app
        self._limit = limit
        self._patience_s = patience_s
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._budget.share() as share:
            try:
                body = await self._read(receive, share)
            except (TimeoutError, Overloaded) as error:
                await _refuse(error)(scope, receive, send)
                return
            if body is None:
                return  # gone before all was said
            if len(body) > self._limit:
                large = InvalidRequest.of("body", f"more than {self._limit} bytes", f"at most {self._limit} bytes")
                await respond(large, _TOO_LARGE)(scope, receive, send)
                return

            async def begun(message: Message) -> None:
                self._budget.give_back(share)  # what was said has become a request
                await send(message)

            told = [bytes(body)]
            del body
            await self._answer(scope, told, receive, begun)

    async def _answer(self, scope: Scope, body: list[bytes], receive: Receive, send: Send) -> None:
        """`body`: the only reference to it, which ends when the app has it."""
        gone = asyncio.Event()

        async def heard() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
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

    async def _read(self, receive: Receive, share: ByteShare) -> bytearray | None:
        """In any `patience_s` there must come as much as at _SLOWEST, or the end."""
        body = bytearray()
        now = asyncio.get_running_loop().time
        deadline, wanted = now() + self._patience_s, 0.0
        while True:
            async with asyncio.timeout_at(deadline):
                message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._limit or not message.get("more_body", False):
                return body
            self._budget.take(share, len(body))
            if len(body) >= wanted:
                deadline, wanted = now() + self._patience_s, len(body) + self._patience_s * _SLOWEST


def _refuse(error: TimeoutError | Overloaded) -> Response:
    if isinstance(error, Overloaded):
        reply = respond(error, _UNAVAILABLE)
    else:
        reply = respond(Expired(f"the body came slower than {_SLOWEST} bytes a second", field="body"), _TOO_SLOW)
    reply.headers["Connection"] = "close"  # the rest of the body would be taken for a request
    return reply
