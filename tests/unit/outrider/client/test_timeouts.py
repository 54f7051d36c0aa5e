"""Timeouts of a whole output, as the clients hand them to gRPC."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.client.aio import AsyncClient
from outrider.client.sync import Client
from outrider.protocol.errors import Expired
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc


class _Slow(rpc.OutriderServicer):
    async def Generate(self, *_: Any) -> AsyncIterator[pb.GenerateReply]:
        yield pb.GenerateReply(started=pb.Started(session_id="one", seed=1, prompt_tokens=1, model="any"))
        await asyncio.sleep(0.3)
        yield pb.GenerateReply(complete=pb.Complete(text="One", finish_reason=1))


@pytest.mark.parametrize(("timeout_s", "text"), [(0.1, None), (60.0, "One"), (1e12, "One"), (math.inf, "One")])
async def test_a_long_timeout_is_not_over_at_once(timeout_s: float, text: str | None) -> None:
    server = grpc.aio.server()
    rpc.add_OutriderServicer_to_server(_Slow(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    def ask_and_wait() -> str | None:
        with Client(address, timeout_s=timeout_s) as client:
            try:
                return client.complete("One").text
            except Expired:
                return None

    try:
        assert await asyncio.to_thread(ask_and_wait) == text
        async with AsyncClient(address, timeout_s=timeout_s) as client:
            if text is not None:
                assert (await client.complete("One")).text == text
            else:
                with pytest.raises(Expired):
                    await client.complete("One")
    finally:
        await server.stop(None)
