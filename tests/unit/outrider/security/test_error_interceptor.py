"""A caller that hangs up while it is written to is nobody's fault."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc._cython import cygrpc
from structlog.testing import capture_logs

from outrider.security.error_interceptor import _checked_stream_handler
from outrider.v1 import common_pb2 as common


class GoneContext:
    """Of a call whose other end is not there any more."""

    def __init__(self) -> None:
        self.aborted = False

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

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
