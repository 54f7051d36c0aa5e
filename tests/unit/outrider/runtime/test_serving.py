"""A service that stops waits for the handlers of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.runtime.serving import RunningCalls

METHOD = "/test.Test/Watch"


async def test_a_handler_that_a_stopped_server_has_cancelled_may_take_its_time_to_end() -> None:
    """A loop that closed before would make gRPC log a trace-back."""
    finish, ended = asyncio.Event(), asyncio.Event()

    async def watch(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        try:
            yield b"here"
            await asyncio.Event().wait()
        finally:
            await finish.wait()
            ended.set()

    calls = RunningCalls()
    server = grpc.aio.server(interceptors=[calls])
    handlers = {"Watch": grpc.stream_stream_rpc_method_handler(watch)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(METHOD)()
            assert await call.read() == b"here"
            assert not await calls.ended(0.05), "it runs"
            await server.stop(None)
            assert not await calls.ended(0.05), "it takes its time"
            finish.set()
            assert await calls.ended(5)
            assert ended.is_set()
    finally:
        finish.set()
        await server.stop(None)
