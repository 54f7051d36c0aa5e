"""A service that stops waits for the handlers of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from outrider.base.aio import critical_task
from outrider.base.config import Settings
from outrider.protocol.errors import StartupError
from outrider.runtime.serving import RunningCalls, serve
from outrider.security.credentials import Credentials

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


class Failing:
    """A service whose loop ends with an error."""

    names = ()
    interceptors = ()

    def __init__(self, settings: Settings) -> None:
        self.credentials = Credentials(settings)
        self.auth_interceptor = RunningCalls()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add nothing: nobody calls."""

    async def start(self, port: int) -> None:
        async def loop() -> None:
            raise RuntimeError("the device is gone")

        self.task = critical_task(loop(), "steps")

    def drain(self) -> None:
        """Nothing runs."""

    def busy(self) -> bool:
        return False

    def ready(self) -> bool:
        return True

    async def stop(self) -> None:
        await asyncio.gather(self.task, return_exceptions=True)


async def test_a_service_whose_loop_fails_does_not_end_as_if_all_were_well() -> None:
    settings = Settings(host="127.0.0.1", port=0)
    with pytest.raises(StartupError, match="its steps failed"):
        await asyncio.wait_for(serve(cast(Any, Failing(settings)), settings), 30)
