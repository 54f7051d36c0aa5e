"""Middleware around every request: request id, API key, body limits, and cancellation when the client leaves."""

from __future__ import annotations

import asyncio
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.admission.byte_budget import UNCOUNTED, ByteBudget, ByteShare
from coordinator.api.http.connections import KNOWN, MIN_BYTES_PER_S
from coordinator.api.http.failures import respond
from outrider.base.aio import background, cancel_all
from outrider.observability.request_context import REQUEST_ID, bind_context
from outrider.protocol.errors import Expired, InvalidRequest, Overloaded, Unauthenticated
from outrider.security.api_keys import HEADER, ApiKeys, bearer
from outrider.security.error_interceptor import as_outrider_error
from outrider.security.tenants import set_tenant

log = structlog.get_logger(__name__)
_POLLED = {("/metrics", 200), ("/health", 200), ("/ready", 200)}  # every few seconds, for as long as it serves


class RequestIds:
    """Middleware that sets the request id on responses and log lines, and turns exceptions into status 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        structlog.contextvars.clear_contextvars()  # of the connection's request before
        context = bind_context(Headers(scope=scope).items(), first=True)
        status, started = 0, time.monotonic()

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = context.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:
            if status:
                raise  # the response has started, so only a broken connection signals the error
            await respond(as_outrider_error(error))(scope, receive, send_on)
        finally:
            ms = round(1000 * (time.monotonic() - started))
            level = log.debug if (scope["path"], status) in _POLLED else log.info
            level("http", method=scope["method"], path=scope["path"], status=status or 499, ms=ms)


class KeyAuth:
    """Middleware that rejects requests without a valid API key, except to open paths."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_to_all: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        holder = self._keys.tenant_of(headers.get(HEADER) or bearer(headers.get("x-api-key", "")))
        if holder is None and scope["path"] not in self._open:
            error = Unauthenticated(f"a valid key is needed here, sent as '{HEADER}: Bearer KEY'", field=HEADER)
            await respond(error)(scope, receive, send)
            return
        if holder is not None:
            set_tenant(holder)
            scope[KNOWN] = True
        await self._app(scope, receive, send)


class BodyReader:
    """Middleware that reads bodies within limits of size and time, and cancels the app when the client leaves."""

    def __init__(self, app: ASGIApp, limit: int, timeout_s: float, budget: ByteBudget) -> None:
        self._app = app
        self._limit = min(limit, budget.limit + UNCOUNTED)
        self._timeout_s = timeout_s
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = int(Headers(scope=scope).get("content-length", 0))
        with self._budget.share() as share:
            try:
                body = bytearray() if declared > self._limit else await self._read(receive, share)
            except (TimeoutError, Overloaded) as error:
                slow = Expired(f"the body arrived slower than {MIN_BYTES_PER_S} bytes a second", field="body")
                reply = respond(error, 503) if isinstance(error, Overloaded) else respond(slow, 408)
                reply.headers["Connection"] = "close"  # the rest of the body would be read as a request
                await reply(scope, receive, send)
                return
            if body is None:
                return  # the client left before the end of the body
            if max(declared, len(body)) > self._limit:
                large = InvalidRequest.of("body", f"more than {self._limit} bytes", f"at most {self._limit} bytes")
                await respond(large, 413)(scope, receive, send)
                return

            async def send_on(message: Message) -> None:
                self._budget.give_back(share)  # the body has become a request
                await send(message)

            holder = [bytes(body)]
            del body
            await self._answer(scope, holder, receive, send_on)

    async def _answer(self, scope: Scope, body: list[bytes], receive: Receive, send: Send) -> None:
        """Run the app; `body` holds the only reference, so that its memory is freed after the app has read it."""
        gone = asyncio.Event()

        async def receive_body() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue
            gone.set()
            await cancel_all([working])

        working = asyncio.ensure_future(self._app(scope, receive_body, send))
        async with background(listen()):
            try:
                await working
            except asyncio.CancelledError:
                if not gone.is_set():
                    raise

    async def _read(self, receive: Receive, share: ByteShare) -> bytearray | None:
        """Return the body, or None if the client leaves; raise TimeoutError below the minimum rate."""
        body = bytearray()
        now = asyncio.get_running_loop().time
        deadline, wanted = now() + self._timeout_s, 0.0
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
                deadline, wanted = now() + self._timeout_s, len(body) + self._timeout_s * MIN_BYTES_PER_S
