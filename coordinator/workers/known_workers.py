"""Known workers: one connection to each, and to those that have left while sessions still use them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import structlog

from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_connection import WorkerConnection
from outrider.protocol.fleet import Role, WorkerInfo, WorkerLoad

log = structlog.get_logger(__name__)


class KnownWorkers:
    """Connections by worker id."""

    def __init__(self, fleet: FleetKeys) -> None:
        self.added = asyncio.Event()
        self._fleet = fleet
        self._present: dict[str, WorkerConnection] = {}
        self._unregistered: dict[str, WorkerConnection] = {}  # removed, but still used by streams of sessions

    def __iter__(self) -> Iterator[WorkerConnection]:
        return iter(list(self._present.values()))

    def of(self, role: Role) -> list[WorkerConnection]:
        return [connection for connection in self if connection.info.role is role]

    def get(self, worker_id: str) -> WorkerConnection | None:
        return self._present.get(worker_id)

    def in_use(self) -> list[WorkerConnection]:
        """Return the connections that may carry streams, those to workers that have left among them."""
        return [*self, *self._unregistered.values()]

    async def put(self, info: WorkerInfo) -> WorkerConnection:
        """Return the connection to a worker: that of before if it is the same worker over a new stream."""
        known = self._present.get(info.worker_id)
        if known is not None and same_worker(known.info, info):
            record_report(known, info)
            return known
        left = self._unregistered.get(info.worker_id)
        if left is not None and same_worker(left.info, info):
            # Its sessions then see its reports, and it counts them.
            record_report(self._unregistered.pop(info.worker_id), info)
            return self._add(left)
        for connection in self:
            if connection.info.worker_id == info.worker_id or same_place(connection.info, info):
                await self.drop(connection.info.worker_id)  # restarted at the same address
        if info.worker_id in self._present:  # another task has added it in the meantime
            return await self.put(info)
        return self._add(WorkerConnection(info, lambda: self._fleet.access(info.role)))

    async def drop(self, worker_id: str) -> None:
        """Remove a worker. Streams of sessions end with the worker, not with its registration."""
        if (connection := self._present.pop(worker_id, None)) is None:
            return
        log.info("worker left", worker=worker_id)
        unused = self._unregistered.get(worker_id) if connection.streams else connection
        if connection.streams:
            self._unregistered[worker_id] = connection
        if unused is not None:
            await unused.close()

    async def close_unused(self, *, every: bool = False) -> None:
        for worker_id, connection in list(self._unregistered.items()):
            if self._unregistered.get(worker_id) is connection and (every or not connection.streams):
                del self._unregistered[worker_id]
                await connection.close()

    async def close(self) -> None:
        for worker_id in list(self._present):
            await self.drop(worker_id)
        await self.close_unused(every=True)

    def _add(self, connection: WorkerConnection) -> WorkerConnection:
        info = connection.info
        self._present[info.worker_id] = connection
        self.added.set()
        log.info("worker joined", worker=info.worker_id, role=info.role.name.lower(), address=info.address)
        return connection


def record_report(connection: WorkerConnection, info: WorkerInfo) -> None:
    """Record what a worker reports of itself. A probed load is newer than a reported one."""
    probed = connection.info.load
    connection.info = info if probed == WorkerLoad() else replace(info, load=probed)


def same_worker(one: WorkerInfo, other: WorkerInfo) -> bool:
    """Return whether two reports agree in all that never changes: all but load, capacity, round trip and draining."""
    changing = {name: getattr(one, name) for name in ("load", "draining", "round_trip_ms", "capacity")}
    model = replace(other.model, sampling=one.model.sampling)  # which coordinators of older versions do not pass on
    return one == replace(other, **changing, model=model)


def same_place(one: WorkerInfo, other: WorkerInfo) -> bool:
    return (one.address, one.role) == (other.address, other.role)
