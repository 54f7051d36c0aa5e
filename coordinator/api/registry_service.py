"""gRPC registry service: workers register, are checked, and stay in the worker pool while their stream lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.targets.fit import check_drafter
from coordinator.workers.worker_connection import WorkerConnection
from outrider.base.aio import Call, background, first_message
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest, ModelMismatch, Unavailable
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
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
        self._compatibility = sessions.worker_pool.compatibility
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
        tokens: tuple[str, ...] = ()
        try:
            if others := self._compatibility.other_vocabularies(info):
                yield pb.RegisterReply(send_vocabulary=True)
                continued, tokens = await _continued(others, requests)  # it may lack tokens that were added for chats
                info = replace(info, model=replace(told, vocabulary_digest=continued.digest))
            if info.role is Role.DRAFTER:
                info = replace(info, model=self._compatibility.adapted(told, info.model, tokens))
            self._refuse_when_stopping()
            self._sessions.delivery.check(info)
            connection = await self._sessions.registrations.admit(info)
            try:
                yield pb.RegisterReply(accepted=True, heartbeat_ms=self._settings.heartbeat_ms)
                reports = self._receive_reports(requests, connection, told, tokens)
                async with background(reports, self._stopping.wait()) as tasks:
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                self._refuse_when_stopping()
            finally:
                connection.registrations -= 1
                # A worker that has registered again over a new stream stays when the old one ends. At shutdown its
                # record stays in Redis: other coordinators continue with the worker while it registers with them.
                present = connection in self._sessions.worker_pool.connections()
                if present and not connection.registrations and not self._stopping.is_set():
                    # Shielded from cancellation: a worker that stays in Redis would be added again.
                    await asyncio.shield(self._sessions.registrations.remove(info.worker_id))
        except ModelMismatch as error:
            if info.role is Role.VERIFIER or self._sessions.targets.settles_in_s <= 0:
                raise
            raise Unavailable(f"{error.message}; is a verifier of its own target starting?") from error

    async def _receive_reports(
        self, requests: _Requests, connection: WorkerConnection, told: ModelInfo, tokens: tuple[str, ...]
    ) -> None:
        compared: object = None  # the served targets that its vocabulary was compared with last
        async for request in requests:
            self._sessions.delivery.check(connection.info)
            now = connection.info.model
            if connection.info.role is Role.DRAFTER:
                check_drafter(now, self._sessions.targets)
            if (served := self._compatibility.served) != compared:  # comparing vocabularies takes milliseconds
                compared, model = served, self._compatibility.adapted(told, now, tokens)
                if model.vocabulary_digest != now.vocabulary_digest:
                    raise Unavailable("another target with this drafter's vocabulary has verifiers now; register again")
            if (report := _worker(request)).model == told:
                report = replace(report, model=now)
            await self._sessions.registrations.update(report, connection)
            await asyncio.sleep(0.05)  # so that a flood of reports holds up its sender only

    def _refuse_when_stopping(self) -> None:
        if self._stopping.is_set():
            raise Unavailable("this coordinator is shutting down; register with another", retry_after_ms=500)


async def _continued(targets: Sequence[Vocabulary], requests: _Requests) -> tuple[Vocabulary, tuple[str, ...]]:
    """Return the first vocabulary that begins with a drafter's, and the drafter's. An error waits for the last part."""
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
    return left[0], left[0].tokens[:read]


def _worker(request: pb.RegisterRequest) -> WorkerInfo:
    if request.WhichOneof("message") != "worker":
        raise InvalidRequest.of("message", request.WhichOneof("message") or "empty", "worker")
    worker = convert.worker_from_proto(request.worker)
    for field, limit in (("kind", "target, or the kind of a drafter"), ("capacity", "at least 1 session")):
        if not (value := getattr(worker, field)):
            raise InvalidRequest.of(f"worker.{field}", "empty" if value == "" else value, limit)
    for field, text in (("worker_id", worker.worker_id), ("kind", worker.kind), ("model.name", worker.model.name)):
        if not text.isprintable():  # terminals of users and operators show them
            raise InvalidRequest.of(f"worker.{field}", repr(text), "printable")
    return worker
