"""A caller that hangs up while it is written to is no error, and a call that fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from structlog.testing import capture_logs

from outrider.protocol.errors import InvalidRequest
from outrider.security.error_interceptor import ErrorInterceptor, _checked_stream_handler
from outrider.v1 import common_pb2 as common


class GoneContext:
    """Of a call whose other end is not there any more."""

    def __init__(self) -> None:
        self.aborted = False

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def trailing_metadata(self) -> tuple[Any, ...]:
        return ()

    async def write(self, reply: Any) -> None:
        raise cygrpc.ExecuteBatchError('Failed "execute_batch"')

    async def abort(self, *_: Any, **__: Any) -> None:
        self.aborted = True


async def test_a_caller_that_is_gone_is_not_logged_as_a_fault_of_ours() -> None:
    closed = False

    async def behaviour(request: Any, context: Any) -> AsyncIterator[common.ProbeReply]:
        nonlocal closed
        try:
            while True:
                yield common.ProbeReply()
        finally:
            closed = True

    context = GoneContext()
    with capture_logs() as logs:
        await _checked_stream_handler(behaviour, 1.0)(common.ProbeRequest(), context)
    assert closed, "what was under way for it ends"
    assert not context.aborted
    assert [line for line in logs if line["log_level"] != "debug"] == []


async def test_a_worker_that_is_gone_is_an_error_for_the_caller() -> None:
    async def behaviour(request: Any, context: Any) -> AsyncIterator[common.ProbeReply]:
        raise cygrpc.ExecuteBatchError("a call of our own")
        yield common.ProbeReply()

    context = GoneContext()
    await _checked_stream_handler(behaviour, 1.0)(common.ProbeRequest(), context)
    assert context.aborted


class Clock:
    """Time of the event loop, which passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    async def passes(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(10):  # timers that are due, and what they wake
            await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock.now)
    return clock


class SlowContext(GoneContext):
    """Of a call whose other end reads each message after a while."""

    def __init__(self, clock: Clock, *pauses: float) -> None:
        super().__init__()
        self.clock = clock
        self.pauses = list(pauses)

    async def write(self, reply: Any) -> None:
        await self.clock.passes(self.pauses.pop(0))


async def replies_after(clock: Clock, *pauses: float) -> AsyncIterator[common.ProbeReply]:
    for pause in pauses:
        await clock.passes(pause)
        yield common.ProbeReply()


async def test_each_write_has_the_whole_timeout_and_pauses_between_them_have_none(clock: Clock) -> None:
    context = SlowContext(clock, 0.06, 0.06, 0.06)
    handler = _checked_stream_handler(lambda request, _: replies_after(clock, 0.0, 0.15, 0.0), 0.1)
    await handler(common.ProbeRequest(), context)
    assert not context.aborted
    assert not context.pauses


async def test_a_write_that_takes_too_long_ends_the_stream_after_earlier_ones_were_in_time(clock: Clock) -> None:
    context = SlowContext(clock, 0.06, 30.0, 0.0)
    handler = _checked_stream_handler(lambda request, _: replies_after(clock, 0.0, 0.0, 0.0), 0.1)
    await handler(common.ProbeRequest(), context)
    assert context.aborted
    assert len(context.pauses) == 1


async def test_a_stream_that_has_ended_leaves_no_timer(clock: Clock) -> None:
    """It would set itself again for as long as the service runs."""
    loop: Any = asyncio.get_running_loop()
    for pauses in ((0.0,), (30.0, 0.0)):
        handler = _checked_stream_handler(lambda request, _: replies_after(clock, 0.0, 0.0), 0.1)
        context = SlowContext(clock, *pauses, 0.0)
        await handler(common.ProbeRequest(), context)
    await clock.passes(1.0)
    assert [handle for handle in loop._scheduled if not handle.cancelled()] == []


class Held:
    """In the place of a large request."""


class Refusing(grpc.GenericRpcHandler):
    """Refuses every call, with a request in its frame."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Held]] = []

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == "/x/unary":
            return grpc.unary_unary_rpc_method_handler(self._unary, common.ProbeRequest.FromString, bytes)
        return grpc.stream_stream_rpc_method_handler(self._stream, common.ProbeRequest.FromString, bytes)

    async def _unary(self, request: Any, context: Any) -> bytes:
        held = Held()
        self.held.append(weakref.ref(held))
        raise InvalidRequest("no")

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            working = asyncio.create_task(self._unary(request, context))  # which its own frame then keeps
            await working
            yield b""


_NO_THREAD = """
import os, resource, threading
from outrider.security.error_interceptor import as_outrider_error
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # root may have any number
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
for work in (threading.Thread(target=int).start, lambda: [][0], lambda: (_ for _ in ()).throw(RuntimeError())):
    try:
        work()
    except Exception as error:
        print(as_outrider_error(error).code)
"""


def test_what_fails_for_want_of_a_thread_may_be_tried_again() -> None:
    done = subprocess.run([sys.executable, "-c", _NO_THREAD], capture_output=True, text=True, timeout=60, check=True)
    codes = [line for line in done.stdout.splitlines() if line in ("unavailable", "internal")]  # not those of the log
    assert codes == ["unavailable", "internal", "internal"]


async def test_a_refused_call_leaves_nothing_to_the_collector_of_garbage() -> None:
    """Collections are rare: what a client was refused stayed in memory, gigabytes of it."""
    handler = Refusing()
    server = grpc.aio.server(interceptors=[ErrorInterceptor(5.0)])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.disable()
    try:
        opened: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        async with opened as channel:
            for call in (channel.unary_unary("/x/unary")(b""), channel.stream_unary("/x/stream")(iter([b""]))):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call
        await server.stop(1.0)
        assert [held() for held in handler.held] == [None, None]
    finally:
        gc.enable()
