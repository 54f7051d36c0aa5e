"""Registrations: workers that report to this coordinator or, by Redis, to another one."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from weakref import WeakValueDictionary

import structlog

from coordinator.persistence.redis_connection import StoreDown
from coordinator.persistence.store import Store
from coordinator.workers.known_workers import record_report, same_place, same_worker
from coordinator.workers.target import Target
from coordinator.workers.worker_connection import WorkerConnection
from coordinator.workers.worker_pool import WorkerPool
from outrider.base.aio import cancel_all
from outrider.protocol.errors import Conflict, InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.protocol.fleet import WorkerInfo

log = structlog.get_logger(__name__)

LOST_AFTER_HEARTBEATS = 5
SILENT_AFTER_HEARTBEATS = 2.5  # then another worker may take its address, as after a restart
MAX_WORKERS = 1024  # of a role
_MAX_FETCHES = 16  # at once, of tokenizers of 128 MiB at most
_ANSWERING = 12  # times as long a worker is kept that answers probes


class Registrations:
    """Additions to the pool and removals from it, shared with other coordinators."""

    def __init__(self, worker_pool: WorkerPool, store: Store, heartbeat_ms: int) -> None:
        self.worker_pool = worker_pool
        self._workers = worker_pool.workers
        self._store = store
        self._heartbeat_s = heartbeat_ms / 1000
        self._lost_after_s = LOST_AFTER_HEARTBEATS * self._heartbeat_s
        worker_pool.targets.settle_s = self._lost_after_s
        self._joins = asyncio.Lock()
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by target
        self._down_at = -math.inf  # when Redis did not tell of workers last
        self._left: dict[str, float] = {}  # end of a worker's registration, by worker id
        self._adding: dict[str, asyncio.Task[None]] = {}  # recorded workers, by worker id
        self._ignored: dict[str, str] = {}  # why they were, by worker id

    async def admit(self, info: WorkerInfo) -> WorkerConnection:
        """Add a worker that reports to this coordinator and count its stream; raise ModelMismatch if it does not fit.

        The caller compares the vocabulary of a drafter first: see `Compatibility.other_vocabularies`.
        """
        connection = await self._add(info)
        connection.registrations += 1  # before anything is awaited: without one, it is forgotten when Redis is slow
        try:
            await self.update(info, connection)
        except BaseException:
            connection.registrations -= 1
            raise
        return connection

    async def update(self, info: WorkerInfo, connection: WorkerConnection) -> None:
        """Record a worker's report; `connection` is the one that its registration stream received."""
        if not same_worker(info, connection.info):
            message = f"this stream reports for {connection.info.worker_id}: identity, role, address and model may not "
            message += "change; open another stream for another worker"
            raise InvalidRequest(message, field="worker", value=info.worker_id, limit="as in the first message")
        if self._workers.get(info.worker_id) is not connection:
            raise Unavailable("this worker was removed; register again", retry_after_ms=500)
        record_report(connection, info)
        connection.seen_at = connection.reported_at = time.monotonic()
        with suppress(StoreDown):  # which is logged, once
            await self._store.put_worker(info, int(1000 * self._lost_after_s))

    async def remove(self, worker_id: str) -> None:
        """Remove a worker whose registration stream has ended."""
        self._left[worker_id] = math.inf  # until Redis has removed it too
        await self._workers.drop(worker_id)
        try:
            with suppress(StoreDown):  # which is logged, once
                await self._store.remove_worker(worker_id)
        finally:
            self._left[worker_id] = time.monotonic()

    async def run(self) -> None:
        """Synchronise with Redis until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._heartbeat_s)
                await self.synchronise()
        finally:
            await cancel_all([*self._adding.values()])

    async def synchronise(self) -> None:
        """Add workers that other coordinators have recorded and remove those that no longer report."""
        asked = time.monotonic()
        known: list[WorkerInfo] = []
        try:
            known = await self._store.workers(self._lost_after_s)
        except StoreDown:  # no worker is forgotten until their records had the time to come again
            self._down_at = asked
        for info in known:
            worker_id, connection = info.worker_id, self._workers.get(info.worker_id)
            if self._left.get(worker_id, 0.0) >= asked:
                continue  # the record is older than its end
            if connection is not None and same_worker(connection.info, info):
                if not connection.registrations:
                    record_report(connection, info)
                connection.seen_at = time.monotonic()
            elif worker_id not in self._adding:
                self._adding[worker_id] = asyncio.create_task(self._add_recorded(info))
        if self._adding:  # a verifier that does not answer holds up nothing else
            await asyncio.wait(self._adding.values(), timeout=self._heartbeat_s)
            self._adding = {worker_id: task for worker_id, task in self._adding.items() if not task.done()}
        self._left = {worker_id: at for worker_id, at in self._left.items() if at >= asked}
        recorded = {info.worker_id for info in known}
        if self._down_at != asked:
            for gone in self._adding.keys() - recorded:
                self._adding[gone].cancel()
        self._ignored = {worker_id: why for worker_id, why in self._ignored.items() if worker_id in recorded}
        await self._forget_silent(recorded)
        self.worker_pool.agree_on_sampling()
        await self._workers.close_unused()

    async def _add_recorded(self, info: WorkerInfo) -> None:
        try:
            await self._add(info)
        except Exception as error:  # neither the record nor the process at its address is trusted
            level, reason = (log.info if isinstance(error, OutriderError) else log.warning), f"{error!r:.300}"
            if reason != self._ignored.get(info.worker_id):  # the record comes again with every heartbeat
                level("worker ignored", worker=info.worker_id, error=reason)
            self._ignored[info.worker_id] = reason

    async def _forget_silent(self, known: set[str]) -> None:
        for connection in self._workers:
            worker_id = connection.info.worker_id
            # One that answers may live: the coordinator that it reports to hangs, or does not reach Redis.
            lost = self._is_late(connection, 1 if connection.is_silent else _ANSWERING)
            if lost and time.monotonic() - self._down_at > self._lost_after_s and worker_id not in known:
                await self._workers.drop(worker_id)

    def _is_late(self, connection: WorkerConnection, times: int = 1) -> bool:
        """Return whether a worker without a registration here was not seen for so many times the usual limit."""
        return not connection.registrations and time.monotonic() - connection.seen_at > times * self._lost_after_s

    async def _add(self, info: WorkerInfo, fetched: Target | None = None) -> WorkerConnection:
        """Add a worker, and the target that was fetched from it."""
        compatibility = self.worker_pool.compatibility
        async with self._joins:  # one by one: a new target is forgotten if another comes before its verifier is known
            self._refuse_impostor(info)
            for each in self._workers:  # restarted there with other weights, it would be refused beside its ghost
                if self._is_late(each) and each.info.worker_id != info.worker_id and same_place(each.info, info):
                    await self._workers.drop(each.info.worker_id)
            is_new = compatibility.check(info)
            if is_new and fetched is not None:
                self.worker_pool.add(fetched)
            if not is_new or fetched is not None:
                connection = await self._workers.put(info)
                connection.seen_at = time.monotonic()
                return connection
        # One verifier of a new target fetches its tokenizer, for up to a minute; only others of it wait.
        identity = compatibility.identity(info.model)
        if identity not in self._fetching and len(self._fetching) >= _MAX_FETCHES:
            raise Overloaded.of("worker.model", info.model.name, f"one of at most {_MAX_FETCHES} being fetched")
        async with self._fetching.setdefault(identity, asyncio.Lock()):
            if compatibility.check(info):
                return await self._add(info, await compatibility.fetch(info))
        return await self._add(info)

    def _refuse_impostor(self, info: WorkerInfo) -> None:
        """Raise Conflict for a worker with the id or address of a present one: a restarted one has a new id."""
        for connection in self._workers:
            if field := self._conflict(info, connection):
                message = f"another worker is registered with this {field}; wait until it has left, or use your own"
                raise Conflict(message, field=f"worker.{field}", value=getattr(info, field), limit="not in use")
        if self._workers.get(info.worker_id) is None and len(self._workers.of(info.role)) >= MAX_WORKERS:
            raise Overloaded(f"{MAX_WORKERS} workers of this role are registered", field="worker", limit=MAX_WORKERS)

    def _conflict(self, info: WorkerInfo, connection: WorkerConnection) -> str:
        """Return the field that a worker shares with a present one, if there is one."""
        quiet_s = time.monotonic() - connection.reported_at
        reports = bool(connection.registrations) and quiet_s <= SILENT_AFTER_HEARTBEATS * self._heartbeat_s
        if connection.info.worker_id == info.worker_id:
            # A worker known only from Redis is present until it is forgotten, or serves another target at its place.
            elsewhere = not (connection.registrations or same_place(connection.info, info))
            present = reports or elsewhere or info.role is not connection.info.role
            return "worker_id" if present and not same_worker(connection.info, info) else ""
        return "address" if reports and same_place(connection.info, info) else ""
