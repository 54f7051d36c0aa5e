"""What a closed client leaves open."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.client.aio import AsyncClient
from outrider.client.sync import Client
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.descriptors import open_files

_CLIENTS = 12
_CLOSES_S = 20.0


class _OneToken(rpc.OutriderServicer):
    async def Generate(self, *_: Any) -> AsyncIterator[pb.GenerateReply]:
        yield pb.GenerateReply(started=pb.Started(session_id="one", seed=1, prompt_tokens=1, model="any"))
        yield pb.GenerateReply(chunk=pb.Chunk(text="One", token_ids=[1], kinds=[1], characters=[3]))
        yield pb.GenerateReply(complete=pb.Complete(finish_reason=1))


async def test_closed_clients_keep_no_socket_open_until_the_next_garbage_collection() -> None:
    """A stream whose last reply ends the loop over it stayed in a cycle of gRPC's, and with it the connection."""
    server = grpc.aio.server()
    rpc.add_OutriderServicer_to_server(_OneToken(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    async def ask() -> None:
        async with AsyncClient(address) as client:
            assert (await client.complete("One")).text == "One"
        async with AsyncClient(address) as client:
            async for _ in client.generate("One"):
                break

    def ask_and_wait() -> None:
        with Client(address) as client:
            assert client.complete("One").text == "One"

    try:
        await asyncio.gather(ask(), asyncio.to_thread(ask_and_wait))  # what gRPC opens once
        gc.collect()
        gc.disable()
        before = _sockets()
        for _ in range(_CLIENTS):
            await asyncio.gather(ask(), asyncio.to_thread(ask_and_wait))
        async with asyncio.timeout(_CLOSES_S):
            while _sockets() > before + 2:
                await asyncio.sleep(0.05)
    finally:
        gc.enable()
        await server.stop(None)


def _sockets() -> int:
    return sum(opened.startswith("socket:") for opened in open_files(os.getpid()))
