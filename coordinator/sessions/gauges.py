"""What the coordinator's metrics read when they are asked for: sessions, workers, Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from coordinator.persistence.store import Store
from coordinator.persistence.write_behind import WriteBehind
from coordinator.sessions.session import Session
from coordinator.workers.worker_pool import WorkerConnection, WorkerPool
from outrider.observability.collectors import Readings
from outrider.observability.metrics import CoordinatorMetrics
from outrider.protocol.fleet import Role

_STATES = ("usable", "draining", "resting", "shunned")


def show(
    metrics: CoordinatorMetrics, sessions: Mapping[str, Session], roster: WorkerPool, store: Store, journal: WriteBehind
) -> None:
    metrics.running.source = lambda: _sessions(sessions, roster, waiting=False)
    metrics.waiting.source = lambda: _sessions(sessions, roster, waiting=True)
    metrics.workers.source = lambda: _workers(roster)
    metrics.violations.source = lambda: [((_role(role),), roster.shunning.violations[role]) for role in Role]
    metrics.round_trips.source = lambda: [(_name(link), link.round_trip_ms / 1000) for link in roster.links()]
    metrics.worker_sessions.source = lambda: [(_name(link), link.sessions) for link in roster.links()]
    metrics.redis_up.source = lambda: [((), float(store.up))]
    metrics.unwritten.source = lambda: [((), journal.unwritten)]


def _sessions(sessions: Mapping[str, Session], roster: WorkerPool, *, waiting: bool) -> Readings:
    """By model; of the present target also when there are none."""
    counts = Counter({roster.target.info.name: 0} if roster.target is not None else {})
    counts.update(
        session.target.info.name
        for session in sessions.values()
        if not session.ended and session.stats.waiting is waiting
    )
    return [((model,), count) for model, count in counts.items()]


def _workers(roster: WorkerPool) -> Readings:
    counts = Counter((link.info.role, roster.state(link)) for link in roster.links())
    return [((_role(role), state), counts[role, state]) for role in Role for state in _STATES]


def _name(link: WorkerConnection) -> tuple[str, str, str]:
    return _role(link.info.role), link.info.kind, link.info.address


def _role(role: Role) -> str:
    return role.name.lower()
