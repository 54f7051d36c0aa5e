"""What the log tells of a call."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from coordinator.api.service import _logged
from outrider.base.aio import Call


@pytest.mark.parametrize("code", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED, None])
async def test_a_call_is_logged_with_the_status_that_it_was_given(code: grpc.StatusCode | None) -> None:
    async def handle(request: bytes, context: Call) -> bytes:
        async with _logged("Cancel", context):
            if code is not None:
                context.set_code(code)
        return b""

    server = grpc.aio.server()
    handlers: Any = {"Call": grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with capture_logs() as lines:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await channel.unary_unary("/test.Service/Call")(b"")
                told = grpc.StatusCode.OK
            except grpc.aio.AioRpcError as error:
                told = error.code()
    await server.stop(None)
    assert [line["status"] for line in lines if line["event"] == "grpc"] == [told.name] == [(code or told).name]
