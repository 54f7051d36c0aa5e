"""Gauges of the coordinator, read on each scrape: sessions, workers, Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coordinator.sessions.session import Session
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.worker_connection import WorkerConnection
from coordinator.workers.worker_pool import WorkerPool
from outrider.observability.collectors import GaugeValues
from outrider.protocol.fleet import Role

_STATES = ("usable", "draining", "resting", "shunned")


def connect_gauges(sessions: SessionManager) -> None:
    metrics, worker_pool = sessions.metrics, sessions.worker_pool
    metrics.running.source = lambda: _sessions(sessions.live, worker_pool, waiting=False)
    metrics.waiting.source = lambda: _sessions(sessions.live, worker_pool, waiting=True)
    metrics.waiting_by_class.source = lambda: _waiting(sessions.live)
    metrics.workers.source = lambda: _workers(worker_pool)
    metrics.violations.source = lambda: [((role.name.lower(),), worker_pool.shunned.violations[role]) for role in Role]
    workers = worker_pool.connections
    metrics.round_trips.source = lambda: [(_name(worker), worker.round_trip_ms / 1000) for worker in workers()]
    metrics.worker_sessions.source = lambda: [(_name(worker), worker.sessions) for worker in workers()]
    metrics.redis_up.source = lambda: [((), float(sessions.store.up))]
    metrics.unwritten.source = lambda: [((), sessions.write_behind.unwritten)]


def _sessions(sessions: Iterable[Session], worker_pool: WorkerPool, *, waiting: bool) -> GaugeValues:
    """Return the number of sessions by model, with 0 for a target that has none."""
    counts = Counter({target.info.name: 0 for target in worker_pool.targets})
    counts.update(each.target.info.name for each in sessions if not each.ended and each.stats.waiting is waiting)
    return [((model,), count) for model, count in counts.items()]


def _waiting(sessions: Iterable[Session]) -> GaugeValues:
    waiting = (session for session in sessions if session.stats.waiting and not session.ended)
    return list(Counter((session.target.info.name, str(session.urgency.priority)) for session in waiting).items())


def _workers(worker_pool: WorkerPool) -> GaugeValues:
    counts = Counter((connection.info.role, worker_pool.state(connection)) for connection in worker_pool.connections())
    return [((role.name.lower(), state), counts[role, state]) for role in Role for state in _STATES]


def _name(connection: WorkerConnection) -> tuple[str, str, str]:
    return connection.info.role.name.lower(), connection.info.kind, connection.info.address
