"""Asyncio client of the coordinator, with the interface of `sync`.

One `AsyncClient` runs many requests concurrently, in the event loop of its first use. To end a stream early, use
`contextlib.aclosing` or cancel the task that reads it: the coordinator then stops at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from outrider.client.events import Finished, Generation, Options, Reply, collect, make_request
from outrider.client.resume import EndpointRotation, StreamProgress, endpoints_of, outrider_errors, resume_request
from outrider.client.sync import DEFAULT_ENDPOINT, SHORT_S
from outrider.protocol import convert
from outrider.protocol.errors import PeerLost, Unavailable
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.statistics import ServerInfo
from outrider.security.channels import Channels
from outrider.security.tls import Tls
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc


class AsyncClient:
    """Client of one fleet; of its coordinators' `endpoints` the first is used until it fails."""

    def __init__(
        self,
        endpoints: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        timeout_s: float | None = None,
        api_key: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._endpoints = endpoints_of(endpoints)
        self._timeout_s = timeout_s
        self._access = Channels(tls, api_key)
        self._channels: list[grpc.aio.Channel] = []  # opened by the first call, in its event loop
        self._endpoint_rotation = EndpointRotation(len(self._endpoints))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> AsyncGenerator[Reply, None]:
        """Stream one output. Give a prompt, or a chat as (role, content) pairs, or tokens."""
        return self._stream(StreamProgress(make_request(prompt, options), len(self._endpoints)))

    def resume(self, session_id: str, position: int = 0, tail: Sequence[int] = ()) -> AsyncGenerator[Reply, None]:
        """Stream an output from the token at `position`; rejection and block mode need those before it, as `tail`."""
        return self._stream(StreamProgress(resume_request(session_id, position, tail), len(self._endpoints)))

    async def complete(self, prompt: str | None = None, **options: Unpack[Options]) -> Generation:
        """Return the complete output of `generate`."""
        return collect([reply async for reply in self.generate(prompt, **options)])

    async def cancel(self, session_id: str) -> bool:
        """Cancel a session; return False if it had already ended."""
        return bool((await self._ask("Cancel", pb.CancelRequest(session_id=session_id))).cancelled)

    async def model(self, name: str = "") -> ModelInfo:
        return convert.model_from_proto(await self._ask("GetModelInfo", common.GetModelInfoRequest(model=name)))

    async def server(self) -> ServerInfo:
        return convert.server_info_from_proto(await self._ask("GetServerInfo", pb.GetServerInfoRequest()))

    async def _ask(self, method: str, request: Message) -> Any:
        """Call a method that has one reply; of the endpoints, the first that answers."""
        for left in reversed(range(len(self._endpoints))):
            with self._endpoint_rotation.attempt(last=not left) as endpoint:
                return await getattr(self._stub(endpoint), method)(request, timeout=SHORT_S)
        raise AssertionError("the last attempt returns or raises")

    def _stub(self, endpoint: int) -> rpc.OutriderAsyncStub:
        if not self._channels:
            self._channels = [self._access.aio_channel(endpoint) for endpoint in self._endpoints]
        return rpc.OutriderStub(self._channels[endpoint])  # type: ignore[return-value]

    async def _stream(self, progress: StreamProgress) -> AsyncGenerator[Reply, None]:
        while True:
            endpoint = self._endpoint_rotation.present
            call = progress.call(self._stub(endpoint), self._timeout_s)
            try:
                with outrider_errors():
                    while (reply := await call.read()) is not grpc.aio.EOF:  # `async for` keeps an open call in a cycle
                        if (received := progress.take(reply)) is not None:
                            yield received
                        if isinstance(received, Finished):
                            return
                raise PeerLost("the stream ended before the output was complete")
            except (PeerLost, Unavailable) as error:
                if not progress.may_retry(time.monotonic()):
                    raise
                pause_s = progress.pause_s(error, time.monotonic())
                self._endpoint_rotation.leave(endpoint, error)
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)
