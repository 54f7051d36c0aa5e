"""Registration client: the worker's stream to a coordinator, open while the worker serves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from outrider.base.aio import cancel_all
from outrider.base.logs import report_progress
from outrider.base.rpc_status import error_from_rpc
from outrider.multiplex.calls import rpc_error
from outrider.protocol import convert
from outrider.protocol.errors import ModelMismatch, Unauthenticated
from outrider.protocol.fleet import WorkerInfo
from outrider.protocol.vocabulary import Vocabulary
from outrider.security.channels import PLAIN, Channels
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc

log = structlog.get_logger(__name__)

RETRY_S = 0.5
_MIN_HEARTBEAT_MS = 50  # as of the coordinator's setting
_VOCABULARY_CHUNK = 8192
_KEY_ADVICE = "; set --fleet-key, or for a drafter --drafter-key, to the coordinator's"


@dataclass(eq=False)
class RegistrationClient:
    """Client that keeps a worker registered with one of `coordinators`, trying them in turn."""

    coordinators: list[str]
    describe: Callable[[], WorkerInfo]
    vocabulary: Vocabulary | None
    access: Callable[[], Channels] = lambda: PLAIN  # called before each attempt: keys and certificates change
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # sends the worker's state before the next heartbeat
    _last_errors: dict[str, str] = field(default_factory=dict)  # by coordinator

    async def run(self) -> None:
        for address in itertools.cycle(self.coordinators):
            try:
                await self._report_to(address)
            except grpc.aio.AioRpcError as lost:
                error = error_from_rpc(lost)
                message = error.message + (_KEY_ADVICE if isinstance(error, Unauthenticated) else "")
                if message != self._last_errors.get(address):  # log each error once, not at every attempt
                    self._last_errors[address] = message
                    level = log.error if isinstance(error, ModelMismatch | Unauthenticated) else log.info
                    level("not registered", coordinator=address, error=message)
                    report_progress(f"not registered: {message}")
            except asyncio.InvalidStateError:
                log.info("registration ended during a write", coordinator=address)
            await asyncio.sleep(RETRY_S)

    async def _report_to(self, address: str) -> None:
        async with self.access().aio_channel(address) as channel:
            call: Any = rpc.RegistryStub(channel).Register()  # type: ignore[call-arg]
            heartbeats: list[asyncio.Task[None]] = []  # one, once the worker is registered
            try:
                await call.write(self._worker())
                while (reply := await call.read()) is not grpc.aio.EOF:  # `async for` keeps an open call in a cycle
                    if reply is None:  # gRPC could not decode it
                        raise rpc_error(grpc.StatusCode.INTERNAL, "its reply is no message")
                    if reply.WhichOneof("message") == "send_vocabulary":
                        async for part in self._vocabulary_chunks():
                            await call.write(part)
                    elif not heartbeats:
                        log.info("registered", coordinator=address)
                        if self._last_errors:
                            report_progress("registered")  # in place of the error
                        self._last_errors.clear()
                        seconds = max(_MIN_HEARTBEAT_MS, reply.heartbeat_ms) / 1000
                        heartbeats.append(asyncio.create_task(self._heartbeat(call, seconds)))
            finally:
                await cancel_all(heartbeats)
                call.cancel()

    async def _heartbeat(self, call: Any, seconds: float) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # no change: send a heartbeat
                async with asyncio.timeout(seconds):
                    await self.changed.wait()
            self.changed.clear()
            await call.write(self._worker())

    def _worker(self) -> pb.RegisterRequest:
        return pb.RegisterRequest(worker=convert.worker_to_proto(self.describe()))

    async def _vocabulary_chunks(self) -> AsyncIterator[pb.RegisterRequest]:
        tokens = self.vocabulary.tokens if self.vocabulary else ()
        for first in range(0, max(1, len(tokens)), _VOCABULARY_CHUNK):
            part = [token.encode("utf-8", "surrogatepass") for token in tokens[first : first + _VOCABULARY_CHUNK]]
            vocabulary = pb.Vocabulary(first_id=first, tokens=part, last=first + len(part) >= len(tokens))
            yield pb.RegisterRequest(vocabulary=vocabulary)
