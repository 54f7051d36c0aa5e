"""gRPC registry service: workers register, are checked, and stay in the worker pool while their stream lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_connection import WorkerConnection
from outrider.base.aio import Call, background, first_message
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest, ModelMismatch, Unavailable
from outrider.protocol.fleet import ModelInfo, WorkerInfo
from outrider.protocol.vocabulary import Vocabulary, check_same_vocabulary
from outrider.security.api_keys import HEADER
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc

_Requests = AsyncIterator[pb.RegisterRequest]


class RegistryService(rpc.RegistryServicer):
    """Service that workers report to."""

    def __init__(self, sessions: SessionManager, settings: CoordinatorSettings, fleet: FleetKeys) -> None:
        self._sessions = sessions
        self._settings = settings
        self._fleet = fleet
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End all streams and refuse new ones, so that workers register with another coordinator."""
        self._stopping.set()

    async def Register(self, requests: _Requests, context: Call) -> AsyncIterator[pb.RegisterReply]:
        """Register a worker while its stream lasts; only the first message sets identity, role, address and model."""
        info = _worker(await first_message(requests, self._settings.open_timeout_s, "worker"))
        self._fleet.check(info.role, dict(context.invocation_metadata() or ()).get(HEADER))
        told = info.model
        if others := self._sessions.worker_pool.compatibility.other_vocabularies(info):
            yield pb.RegisterReply(send_vocabulary=True)
            continued = await _continued(others, requests)  # the drafter may lack tokens that were added for chats
            info = replace(info, model=replace(told, vocabulary_digest=continued.digest))
        self._refuse_when_stopping()
        self._sessions.delivery.check(info)
        connection = await self._sessions.registrations.admit(info)
        try:
            yield pb.RegisterReply(accepted=True, heartbeat_ms=self._settings.heartbeat_ms)
            async with background(self._receive_reports(requests, connection, told), self._stopping.wait()) as tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            self._refuse_when_stopping()
        finally:
            connection.registrations -= 1
            # A worker that has registered again over a new stream stays when the old one ends. At shutdown its record
            # stays in Redis: other coordinators continue with the worker while it registers with them.
            present = connection in self._sessions.worker_pool.connections()
            if present and not connection.registrations and not self._stopping.is_set():
                # Shielded from cancellation: a worker that stays in Redis would be added again.
                await asyncio.shield(self._sessions.registrations.remove(info.worker_id))

    async def _receive_reports(self, requests: _Requests, connection: WorkerConnection, told: ModelInfo) -> None:
        async for request in requests:
            self._sessions.delivery.check(connection.info)
            if connection.info.model != told and self._sessions.worker_pool.compatibility.has_vocabulary(told):
                raise Unavailable("a target with this drafter's own vocabulary has come; register again")
            if (report := _worker(request)).model == told:
                report = replace(report, model=connection.info.model)
            await self._sessions.registrations.update(report, connection)
            await asyncio.sleep(0.05)  # so that a flood of reports holds up its sender only

    def _refuse_when_stopping(self) -> None:
        if self._stopping.is_set():
            raise Unavailable("this coordinator is shutting down; register with another", retry_after_ms=500)


async def _continued(targets: Sequence[Vocabulary], requests: _Requests) -> Vocabulary:
    """Return the first that begins as a drafter's, which is read to its end, else an error would not arrive."""
    left, read, difference = [*targets], 0, ModelMismatch("the drafter has sent no vocabulary")
    async for request in requests:
        await asyncio.sleep(0.05)  # as for reports
        if request.WhichOneof("message") != "vocabulary":
            continue  # a heartbeat sent before the request for the vocabulary
        part = request.vocabulary
        if part.first_id != read:
            raise InvalidRequest.of("vocabulary.first_id", part.first_id, f"{read}, the next one")
        read += len(part.tokens)
        try:
            tokens = [token.decode("utf-8", "surrogatepass") for token in part.tokens]
        except UnicodeDecodeError as error:
            raise InvalidRequest.of("vocabulary.tokens", repr(error.object), "UTF-8") from error
        for target in [*left]:
            try:
                check_same_vocabulary(target, part.first_id, tokens, last=not (part.first_id or tokens))
            except ModelMismatch as error:
                left.remove(target)
                difference = error  # in the end, of a target that agrees longest
        if part.last:
            break
    if not left or not read:
        raise difference
    return left[0]


def _worker(request: pb.RegisterRequest) -> WorkerInfo:
    if request.WhichOneof("message") != "worker":
        raise InvalidRequest.of("message", request.WhichOneof("message") or "empty", "worker")
    worker = convert.worker_from_proto(request.worker)
    for field, limit in (("kind", "target, or the kind of a drafter"), ("capacity", "at least 1 session")):
        if not (value := getattr(worker, field)):
            raise InvalidRequest.of(f"worker.{field}", "empty" if value == "" else value, limit)
    return worker
