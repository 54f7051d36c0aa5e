"""API keys as programs give them to the clients: with the end of a line, or with what no header can carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.client.aio import AsyncClient
from outrider.client.sync import Client
from outrider.protocol.errors import InvalidRequest
from outrider.security.api_keys import HEADER
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc


class _Echo(rpc.OutriderServicer):
    """Answer each request with the key that came with it."""

    async def Generate(self, _request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        key = dict(context.invocation_metadata()).get(HEADER, "none")
        yield pb.GenerateReply(started=pb.Started(session_id="one", seed=1, prompt_tokens=1, model="any"))
        yield pb.GenerateReply(complete=pb.Complete(text=key, finish_reason=1))


async def answers(key: Any) -> list[str]:
    """Return what both clients get."""
    server = grpc.aio.server()
    rpc.add_OutriderServicer_to_server(_Echo(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    def ask_and_wait() -> str:
        with Client(address, api_key=key) as client:
            return client.complete("One").text

    try:
        async with asyncio.timeout(10), AsyncClient(address, api_key=key) as client:
            return [(await client.complete("One")).text, await asyncio.to_thread(ask_and_wait)]
    finally:
        await server.stop(None)


async def test_blanks_around_a_key_are_no_part_of_it() -> None:
    assert await answers("s3cret\n") == ["Bearer s3cret"] * 2
    assert [await answers(none) for none in ("", None, "\n")] == [["none"] * 2] * 3


@pytest.mark.parametrize("key", ["s3\ncret", "s3cr\u0451t", "s3cr\0t"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_key_that_no_header_can_carry_is_refused_unseen(kind: Any, key: str) -> None:
    """gRPC's asynchronous calls waited for ever, the others quoted it in a ValueError."""

    async def ask() -> None:
        made = kind("127.0.0.1:1", api_key=key)
        await made.complete("One")

    with pytest.raises(InvalidRequest) as caught:
        await asyncio.wait_for(ask(), 10)
    assert "s3" not in str(caught.value)
