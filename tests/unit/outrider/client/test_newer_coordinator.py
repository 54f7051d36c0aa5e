"""What a coordinator of a newer version may send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.client.aio import AsyncClient
from outrider.client.sync import Client
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc

_FIELD_9999 = bytes([0xFA, 0xF0, 0x04, 3]) + b"new"


class _Newer(rpc.OutriderServicer):
    async def Generate(self, *_: Any) -> AsyncIterator[pb.GenerateReply]:
        started = pb.Started(session_id="one", seed=1, prompt_tokens=1, model="any")
        yield pb.GenerateReply.FromString(pb.GenerateReply(started=started).SerializeToString() + _FIELD_9999)
        yield pb.GenerateReply.FromString(_FIELD_9999)
        yield pb.GenerateReply(chunk=pb.Chunk(text="One", token_ids=[1], kinds=[1], characters=[3]))
        yield pb.GenerateReply(complete=pb.Complete(finish_reason=1))


async def test_fields_and_messages_that_a_client_does_not_know_are_ignored() -> None:
    server = grpc.aio.server()
    rpc.add_OutriderServicer_to_server(_Newer(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    def ask_and_wait() -> str:
        with Client(address) as client:
            return client.complete("One").text

    try:
        assert await asyncio.to_thread(ask_and_wait) == "One"
        async with AsyncClient(address) as client:
            assert (await client.complete("One")).text == "One"
    finally:
        await server.stop(None)
