"""Worker pool: verifiers and drafters that report to this coordinator or, by Redis, to another one.

It keeps one connection to each worker and chooses the least loaded for a
session.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from coordinator.persistence.redis_connection import StoreDown
from coordinator.persistence.store import Store
from coordinator.workers.compatibility import Compatibility
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.liveness import watch
from coordinator.workers.shunned import ShunnedWorkers
from coordinator.workers.target import Target
from coordinator.workers.worker_connection import WorkerConnection
from outrider.protocol.errors import Conflict, InvalidRequest, ModelMismatch, OutriderError, Overloaded
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad

log = structlog.get_logger(__name__)

POLL_S = 0.1
LOST_AFTER_HEARTBEATS = 5
SILENT_AFTER_HEARTBEATS = 2.5  # then another worker may take its address, as after a restart
MAX_WORKERS = 1024  # of a role


def _any_worker(_: WorkerConnection) -> bool:
    return True


class WorkerPool:
    """Known workers by id."""

    def __init__(
        self,
        store: Store,
        heartbeat_ms: int,
        fleet: FleetKeys,
        verdict_timeout_s: float,
        on_target: Callable[[ModelInfo], object] = lambda _: None,
    ) -> None:
        """Start empty; `on_target` is called with each new target, before its first session."""
        self._store = store
        self._verdict_timeout_s = verdict_timeout_s
        self._heartbeat_ms = heartbeat_ms
        self._fleet = fleet
        self.shunned = ShunnedWorkers()
        self._compatibility = Compatibility(fleet, lambda: bool(self._of(Role.VERIFIER)), on_target)
        self._connections: dict[str, WorkerConnection] = {}
        self._unregistered: dict[str, WorkerConnection] = {}  # removed, but still used by streams of sessions
        self._seen: dict[str, float] = {}
        self._left: dict[str, float] = {}  # end of a worker's registration, by worker id
        self._changed = asyncio.Event()

    @property
    def target(self) -> Target | None:
        return self._compatibility.target

    @property
    def ready(self) -> bool:
        return self.target is not None and any(self.usable(connection) for connection in self._of(Role.VERIFIER))

    def usable(self, connection: WorkerConnection) -> bool:
        return connection.usable() and not self.shunned.is_shunned(connection.info)

    def state(self, connection: WorkerConnection) -> str:
        """Return the state as a metric label."""
        if self.shunned.is_shunned(connection.info):
            return "shunned"
        if connection.info.draining:
            return "draining"
        return "usable" if connection.usable() else "resting"

    def connections(self) -> list[WorkerConnection]:
        return list(self._connections.values())

    def vocabulary_differs(self, info: WorkerInfo) -> bool:
        return self._compatibility.vocabulary_differs(info)

    async def admit(self, info: WorkerInfo) -> WorkerConnection:
        """Add a worker that reports to this coordinator; raise ModelMismatch if it does not fit.

        The caller compares the vocabulary of a drafter first: see `vocabulary_differs`.
        """
        connection = await self._check_and_put(info)
        await self.update(info, connection)
        return connection

    async def update(self, info: WorkerInfo, connection: WorkerConnection) -> None:
        """Record a worker's report; `connection` is the one that its registration stream received."""
        if identity(info) != identity(connection.info):
            raise InvalidRequest(
                f"this stream reports for {connection.info.worker_id}: identity, role, address and model may not "
                "change; open another stream for another worker",
                field="worker",
                value=info.worker_id,
                limit="as in the first message",
            )
        if self._connections.get(info.worker_id) is not connection:
            return  # it was removed meanwhile
        connection.info = replace(info, load=_newer(connection.info.load, info.load))
        self._seen[info.worker_id] = connection.reported_at = time.monotonic()
        try:
            await self._store.put_worker(info, LOST_AFTER_HEARTBEATS * self._heartbeat_ms)
        except StoreDown as error:
            log.debug("worker not written to redis", worker=info.worker_id, error=error.message)

    async def remove(self, worker_id: str) -> None:
        """Remove a worker whose registration stream has ended."""
        self._left[worker_id] = math.inf  # until Redis has removed it too
        await self._drop(worker_id)
        try:
            await self._store.remove_worker(worker_id)
        except StoreDown as error:
            log.debug("worker not removed from redis", worker=worker_id, error=error.message)
        finally:
            self._left[worker_id] = time.monotonic()

    def choose(
        self, role: Role, fits: Callable[[WorkerConnection], bool] = _any_worker, *, prefer: str = ""
    ) -> WorkerConnection | None:
        """Return, of the usable workers that fit, the preferred one or else the least loaded."""
        usable = [connection for connection in self._of(role) if self.usable(connection) and fits(connection)]
        usable = [connection for connection in usable if not connection.is_silent] or usable
        chosen = next((connection for connection in usable if connection.info.worker_id == prefer), None)
        if chosen is not None or not usable:
            return chosen
        return min(usable, key=lambda connection: (connection.occupancy(), connection.round_trip_ms))

    async def wait_for(
        self, seconds: float, choose: Callable[[], WorkerConnection | None], *, poll_s: float = POLL_S
    ) -> WorkerConnection | None:
        """Return a chosen worker, waiting for one if necessary, or None after `seconds`."""
        deadline = time.monotonic() + seconds
        while (connection := choose()) is None and time.monotonic() < deadline:
            self._changed.clear()
            try:
                # Polled, because a backoff ends without an event.
                async with asyncio.timeout(min(poll_s, max(0.01, deadline - time.monotonic()))):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return connection

    async def run(self) -> None:
        """Synchronise with Redis until cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_ms / 1000)
            await self.synchronise()

    async def synchronise(self) -> None:
        """Add workers that other coordinators have recorded and remove those that no longer report."""
        asked = time.monotonic()
        try:
            known = await self._store.workers(LOST_AFTER_HEARTBEATS * self._heartbeat_ms / 1000)
        except StoreDown:
            known = []  # without Redis, no worker is forgotten
        for info in known:
            if self._left.get(info.worker_id, 0.0) < asked:  # else the record is older than its end
                await self._add_recorded(info)
        self._left = {worker_id: at for worker_id, at in self._left.items() if at >= asked}
        await self._forget_silent({info.worker_id for info in known})
        await self._close_unused()

    async def watch(self) -> None:
        """Take sessions from silent workers until cancelled."""
        await watch(
            lambda: [*self.connections(), *self._unregistered.values()], self._has_spare, self._verdict_timeout_s
        )

    async def close(self) -> None:
        for worker_id in list(self._connections):
            await self._drop(worker_id)
        await self._close_unused(every=True)

    def _has_spare(self, silent: WorkerConnection) -> bool:
        others = [connection for connection in self._of(silent.info.role) if connection is not silent]
        return any(self.usable(connection) and not connection.is_silent for connection in others)

    async def _add_recorded(self, info: WorkerInfo) -> None:
        connection = self._connections.get(info.worker_id)
        if connection is not None and identity(connection.info) == identity(info):
            if not connection.registrations:
                connection.info = replace(info, load=_newer(connection.info.load, info.load))
            self._seen[info.worker_id] = time.monotonic()
            return
        try:
            await self._check_and_put(info)
        except OutriderError as error:
            log.info("worker ignored", worker=info.worker_id, error=error.message)
        except Exception as error:  # neither the record nor the process at its address is trusted
            log.warning("worker ignored", worker=info.worker_id, error=repr(error)[:200])
        else:
            self._seen[info.worker_id] = time.monotonic()

    async def _check_and_put(self, info: WorkerInfo) -> WorkerConnection:
        self._refuse_impostor(info)
        if await self._compatibility.check(info):
            await self._drop_incompatible_drafters()
        self._refuse_impostor(info)  # the check awaited, so another worker may have joined
        return await self._put(info)

    def _refuse_impostor(self, info: WorkerInfo) -> None:
        """Raise Conflict for a worker with the id or the address of a present one.

        A restarted worker has a new id, and its old stream has ended or is silent by then.
        """
        for connection in self._connections.values():
            if (taken := self._conflict(info, connection)) is not None:
                field, value = taken
                raise Conflict(
                    f"another worker is registered with this {field}; wait until it has left, or use one of your own",
                    field=f"worker.{field}",
                    value=value,
                    limit="not in use",
                )
        if info.worker_id not in self._connections and len(self._of(info.role)) >= MAX_WORKERS:
            raise Overloaded(f"{MAX_WORKERS} workers of this role are registered", field="worker", limit=MAX_WORKERS)

    def _conflict(self, info: WorkerInfo, connection: WorkerConnection) -> tuple[str, str] | None:
        """Return the field and value that a worker shares with a present one, or None."""
        limit_s = SILENT_AFTER_HEARTBEATS * self._heartbeat_ms / 1000
        reports = bool(connection.registrations) and time.monotonic() - connection.reported_at <= limit_s
        if connection.info.worker_id == info.worker_id:
            # A worker known only from Redis is present until it is forgotten.
            present = reports or not connection.registrations
            return ("worker_id", info.worker_id) if present and identity(connection.info) != identity(info) else None
        return ("address", info.address) if reports and _place(connection.info) == _place(info) else None

    async def _forget_silent(self, known: set[str]) -> None:
        limit_s = LOST_AFTER_HEARTBEATS * self._heartbeat_ms / 1000
        for worker_id, connection in list(self._connections.items()):
            silent = time.monotonic() - self._seen.get(worker_id, 0.0) > limit_s
            if silent and not connection.registrations and self._store.up and worker_id not in known:
                await self._drop(worker_id)

    async def _drop_incompatible_drafters(self) -> None:
        for connection in self._of(Role.DRAFTER):
            try:
                self._compatibility.check_drafter(connection.info)
            except ModelMismatch as error:
                log.warning(
                    "drafter removed: does not fit the target", worker=connection.info.worker_id, error=error.message
                )
                await self._drop(connection.info.worker_id)

    async def _put(self, info: WorkerInfo) -> WorkerConnection:
        known = self._connections.get(info.worker_id)
        if known is not None and identity(known.info) == identity(info):
            # The same worker over a new stream: keep the connection that its sessions use.
            known.info = replace(info, load=_newer(known.info.load, info.load))
            return known
        if (known := self._returned(info)) is not None:
            return known
        await self._drop(info.worker_id)
        for connection in self.connections():
            if _place(connection.info) == _place(info):
                await self._drop(connection.info.worker_id)  # restarted at the same address
        return self._add(WorkerConnection(info, lambda: self._fleet.access(info.role)))

    def _add(self, connection: WorkerConnection) -> WorkerConnection:
        info = connection.info
        self._connections[info.worker_id] = connection
        self._changed.set()
        log.info("worker joined", worker=info.worker_id, role=info.role.name.lower(), address=info.address)
        return connection

    def _returned(self, info: WorkerInfo) -> WorkerConnection | None:
        """Return the connection of a worker that registers again while sessions still use it.

        They then see its reports, and it counts them.
        """
        connection = self._unregistered.get(info.worker_id)
        if connection is None or identity(connection.info) != identity(info):
            return None
        del self._unregistered[info.worker_id]
        connection.info = replace(info, load=_newer(connection.info.load, info.load))
        return self._add(connection)

    async def _drop(self, worker_id: str) -> None:
        """Remove a worker. Streams of sessions end with the worker, not with its registration."""
        connection = self._connections.pop(worker_id, None)
        self._seen.pop(worker_id, None)
        if connection is None:
            return
        log.info("worker left", worker=worker_id)
        if connection.streams:
            older, self._unregistered[worker_id] = self._unregistered.get(worker_id), connection
            connection = older
        if connection is not None:
            await connection.close()

    async def _close_unused(self, *, every: bool = False) -> None:
        for worker_id, connection in list(self._unregistered.items()):
            if every or not connection.streams:
                del self._unregistered[worker_id]
                await connection.close()

    def _of(self, role: Role) -> list[WorkerConnection]:
        return [connection for connection in self._connections.values() if connection.info.role is role]


def identity(info: WorkerInfo) -> WorkerInfo:
    """Return the fields of a worker that never change: all but load, capacity and draining."""
    return replace(info, load=WorkerLoad(), draining=False, round_trip_ms=0.0, capacity=1)


def _place(info: WorkerInfo) -> tuple[str, Role]:
    return info.address, info.role


def _newer(probed: WorkerLoad, reported: WorkerLoad) -> WorkerLoad:
    """Return the probed load, which is newer than a heartbeat's, or the reported one before the first probe."""
    return reported if probed == WorkerLoad() else probed
