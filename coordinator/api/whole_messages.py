"""gRPC interceptor that reads clients' messages within the coordinator's byte budget.

`http.limits.BodyReader` is its counterpart for HTTP. gRPC does not report how much of a message has arrived. A message
that takes longer therefore counts as the largest allowed one until it is complete, so that slow clients cannot use more
memory than the budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health

from coordinator.admission.byte_budget import ByteBudget, ByteShare
from outrider.base.aio import Call, Continuation
from outrider.protocol.errors import Expired, InvalidRequest, OutriderError

log = structlog.get_logger(__name__)

# Counted in ticks of the event loop, so that a pause of this process makes no message late.
TICK_S = 0.02
SOON_TICKS = 5


class WholeMessages(grpc.aio.ServerInterceptor):
    """Interceptor that serves unary requests as streams, whose handler controls the reading."""

    def __init__(self, budget: ByteBudget, largest: int, timeout_s: float, exempt: str, first: str) -> None:
        """Set the limits; `largest` is a message's size in bytes. The streams of two services are silent for long.

        Those of `exempt` are not controlled, of those of `first` the first message is.
        """
        self._budget = budget
        self._largest = min(largest, budget.limit)
        self._timeout_s = timeout_s
        self._exempt, self._first = exempt, first

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        service = method.strip("/").partition("/")[0]
        if handler is None or service == self._exempt:
            return handler
        # Health needs no key: large messages are not read there.
        behaviour = self._reading(handler, large=service != health.SERVICE_NAME, every=service != self._first)
        read, write = handler.request_deserializer, handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(behaviour, read, write)

    def _reading(self, handler: Any, *, large: bool, every: bool) -> Callable[..., AsyncIterator[Any]]:
        async def behaviour(requests: AsyncIterator[Any], context: Call) -> AsyncIterator[Any]:
            with self._budget.share() as share:
                given: Any = self._messages(context, share, large=large, every=every)
                if not handler.request_streaming:
                    async with contextlib.aclosing(given) as messages:
                        given = await anext(messages, None)
                    if given is None:
                        raise InvalidRequest("the call ended before its message", field="request")
                streaming = handler.stream_stream or handler.unary_stream
                if streaming is None:
                    yield await (handler.stream_unary or handler.unary_unary)(given, context)
                elif not inspect.isasyncgenfunction(streaming):
                    await streaming(given, context)  # a handler of a library, which writes to its context itself
                else:
                    async with contextlib.aclosing(streaming(given, context)) as replies:
                        given = None  # it may have megabytes, and its answer may take minutes
                        async for reply in replies:
                            if share.held:
                                self._budget.give_back(share)  # the message has become a request
                            yield reply

        return behaviour

    async def _messages(self, sent: Call, share: ByteShare, *, large: bool, every: bool) -> AsyncGenerator[Any, None]:
        read: Callable[[], Awaitable[Any]] = partial(self._read, sent, share, large=large)
        try:
            while (message := await read()) is not grpc.aio.EOF:
                yield message
                read = read if every else sent.read
        except OutriderError as error:
            log.info("request refused", code=error.code, error=error.message)
            raise

    async def _read(self, sent: Call, share: ByteShare, *, large: bool) -> Any:
        """Return the next complete message, or EOF; raise Overloaded, Expired or InvalidRequest."""
        reading = asyncio.ensure_future(sent.read())
        try:
            for _ in range(SOON_TICKS):
                if not reading.done():
                    await asyncio.wait({reading}, timeout=TICK_S)
            if not reading.done() and large:
                self._budget.take(share, self._largest)
                await asyncio.wait({reading}, timeout=self._timeout_s)
            if not reading.done():
                raise Expired("the message did not arrive in time", field="request", limit=f"{self._timeout_s:g} s")
            message = reading.result()
        finally:
            reading.cancel()
            del reading  # else an error's traceback and this frame are a cycle, and the message stays in memory
        if message is not grpc.aio.EOF:
            self._budget.take(share, message.ByteSize())
        return message
