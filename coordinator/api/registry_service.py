"""The coordinator's gRPC edge for workers: they report, prove that they fit, and are in the roster while they stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from coordinator.settings import CoordinatorSettings
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_pool import WorkerConnection, WorkerPool
from outrider.base.aio import background, first_message
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest, ModelMismatch, Unavailable
from outrider.protocol.fleet import WorkerInfo
from outrider.protocol.vocabulary import Vocabulary, refuse_difference
from outrider.security.api_keys import HEADER
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc


class RegistryService(rpc.RegistryServicer):
    def __init__(self, roster: WorkerPool, settings: CoordinatorSettings, fleet: FleetKeys) -> None:
        self._roster = roster
        self._settings = settings
        self._fleet = fleet
        self._leaving = asyncio.Event()

    def stop(self) -> None:
        """End every stream, and refuse new ones: workers register with another coordinator."""
        self._leaving.set()

    async def Register(
        self, requests: AsyncIterator[pb.RegisterRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.RegisterReply]:
        """Identity, role, address and model are those of the first message for as long as the stream lasts."""
        info = _worker(await first_message(requests, self._settings.open_timeout_s, "worker"))
        self._fleet.check(info.role, dict(context.invocation_metadata() or ()).get(HEADER))
        if self._roster.target is not None and self._roster.vocabulary_differs(info):
            yield pb.RegisterReply(send_vocabulary=True)
            await _compare(self._roster.target.vocabulary, requests)
        self._refuse_when_leaving()
        link = await self._roster.admit(info)
        link.registrations += 1
        try:
            yield pb.RegisterReply(accepted=True, heartbeat_ms=self._settings.heartbeat_ms)
            async with background(self._take_reports(requests, link), self._left()) as tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            self._refuse_when_leaving()
        finally:
            link.registrations -= 1
            # A worker that came back over a new stream stays when its old one ends. When this coordinator leaves, the
            # worker's record stays in Redis: other coordinators go on with the worker while it registers with them.
            if link in self._roster.links() and not link.registrations and not self._leaving.is_set():
                # This call may be cancelled while it runs, but the worker must leave Redis too, or it comes back.
                await asyncio.shield(self._roster.left(info.worker_id))

    async def _take_reports(self, requests: AsyncIterator[pb.RegisterRequest], link: WorkerConnection) -> None:
        async for request in requests:
            await self._roster.heard_from(_worker(request), link)

    async def _left(self) -> None:
        await self._leaving.wait()

    def _refuse_when_leaving(self) -> None:
        if self._leaving.is_set():
            raise Unavailable("this coordinator is leaving; register with another", retry_after_ms=500)


async def _compare(target: Vocabulary, requests: AsyncIterator[pb.RegisterRequest]) -> None:
    """All of a vocabulary is read before it is judged: refusing somebody who is still sending would lose the reason."""
    difference: ModelMismatch | None = None
    async for request in requests:
        if request.WhichOneof("message") != "vocabulary":
            continue  # a heartbeat that was on its way
        part = request.vocabulary
        tokens = [_text(token) for token in part.tokens]
        try:
            if difference is None:
                refuse_difference(target, part.first_id, tokens, last=part.last)
        except ModelMismatch as found:
            difference = found
        if part.last:
            break
    if difference is not None:
        raise difference


def _text(token: bytes) -> str:
    try:
        return token.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise InvalidRequest.of("vocabulary.tokens", repr(token), "UTF-8") from error


def _worker(request: pb.RegisterRequest) -> WorkerInfo:
    if request.WhichOneof("message") != "worker":
        raise InvalidRequest.of("message", request.WhichOneof("message") or "empty", "worker")
    return convert.worker_from_proto(request.worker)
