"""Synchronous client of the coordinator over gRPC, for the command line, load tests and programs.

`Client.generate` yields `Started`, `Tokens` and finally `Finished`. A broken stream is resumed, on the same or the next
endpoint, without lost or repeated tokens. `aio` has the same client for asyncio.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Self, Unpack

from google.protobuf.message import Message

from outrider.client.events import Finished, Generation, Options, Reply, Started, Tokens, collect, make_request
from outrider.client.resume import EndpointRotation, StreamProgress, endpoints_of, outrider_errors, resume_request
from outrider.protocol import convert
from outrider.protocol.errors import PeerLost, Unavailable
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.statistics import ServerInfo
from outrider.security.channels import Channels
from outrider.security.tls import Tls
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc

__all__ = ["DEFAULT_ENDPOINT", "Client", "Finished", "Generation", "Options", "Reply", "Started", "Tls", "Tokens"]

DEFAULT_ENDPOINT = "127.0.0.1:50050"
SHORT_S = 10.0  # timeout of unary calls


class Client:
    """Client of one fleet; of its coordinators' `endpoints` the first is used until it fails."""

    def __init__(
        self,
        endpoints: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        timeout_s: float | None = None,
        api_key: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._channels = [Channels(tls, api_key).channel(endpoint) for endpoint in endpoints_of(endpoints)]
        self._stubs = [rpc.OutriderStub(channel) for channel in self._channels]  # gRPC crashes if made after close()
        self._endpoint_rotation = EndpointRotation(len(self._channels))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Iterator[Reply]:
        """Stream one output. Give a prompt, or a chat as (role, content) pairs, or tokens."""
        return self._stream(StreamProgress(make_request(prompt, options), len(self._channels)))

    def resume(self, session_id: str, position: int = 0, tail: Sequence[int] = ()) -> Iterator[Reply]:
        """Stream an output from the token at `position`; rejection and block mode need those before it, as `tail`."""
        return self._stream(StreamProgress(resume_request(session_id, position, tail), len(self._channels)))

    def complete(self, prompt: str | None = None, **options: Unpack[Options]) -> Generation:
        """Return the complete output of `generate`."""
        return collect(self.generate(prompt, **options))

    def cancel(self, session_id: str) -> bool:
        """Cancel a session; return False if it had already ended."""
        return bool(self._ask("Cancel", pb.CancelRequest(session_id=session_id)).cancelled)

    def model(self, name: str = "") -> ModelInfo:
        return convert.model_from_proto(self._ask("GetModelInfo", common.GetModelInfoRequest(model=name)))

    def server(self) -> ServerInfo:
        return convert.server_info_from_proto(self._ask("GetServerInfo", pb.GetServerInfoRequest()))

    def _ask(self, method: str, request: Message) -> Any:
        """Call a method that has one reply; of the endpoints, the first that answers."""
        for left in reversed(range(len(self._stubs))):
            with self._endpoint_rotation.attempt(last=not left) as endpoint:
                return getattr(self._stubs[endpoint], method)(request, timeout=SHORT_S)
        raise AssertionError("the last attempt returns or raises")

    def _stream(self, progress: StreamProgress) -> Iterator[Reply]:
        while True:
            endpoint = self._endpoint_rotation.present
            with ThreadPoolExecutor(1) as thread:  # Ctrl-C while it begins a call would keep gRPC waiting forever
                call = thread.submit(copy_context().run, progress.call, self._stubs[endpoint], self._timeout_s).result()
            try:
                with outrider_errors():
                    for reply in call:
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
            time.sleep(pause_s)
