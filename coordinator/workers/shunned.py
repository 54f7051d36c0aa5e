"""Shunned workers: not used for a time after a protocol violation, longer with each further one."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

import structlog

from outrider.protocol.fleet import Role, WorkerInfo

log = structlog.get_logger(__name__)

FIRST_S = 5.0
FACTOR = 4.0
MAX_S = 900.0
FORGIVEN_AFTER = 10.0  # multiple of the last shunning without a further violation
_REMEMBERED = 4_096  # ids and addresses; inventing more requires the fleet key

_Name = tuple[Role, str, str]


class ShunnedWorkers:
    """Shunned workers by id and address (a new id does not help), with a record for ten times their last shunning."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.violations: Counter[Role] = Counter(dict.fromkeys(Role, 0))
        self._now = now
        self._entries: OrderedDict[_Name, tuple[float, float]] = OrderedDict()  # of the last one: its length, its end

    def report(self, worker: WorkerInfo, reason: str, verifier: str = "") -> None:
        """Shun a worker for a violation, by the word of a `verifier` in its sessions; reports meanwhile only count."""
        self.violations[worker.role] += 1
        if self.is_shunned(worker, verifier):
            return
        now, names = self._now(), _names(worker, verifier)
        known = [self._entries[name] for name in names if name in self._entries]
        recent = max((length for length, until in known if now < until + FORGIVEN_AFTER * length), default=0.0)
        seconds = min(MAX_S, recent * FACTOR) if recent else FIRST_S
        for name in names:
            self._entries[name] = seconds, now + seconds
            self._entries.move_to_end(name)
        while len(self._entries) > _REMEMBERED:
            self._entries.popitem(last=False)
        log.warning(
            "worker shunned: protocol violation",
            worker=worker.worker_id,
            role=worker.role.name.lower(),
            address=worker.address,
            seconds=seconds,
            error=reason,
            sessions_of=verifier or "all verifiers",
        )

    def is_shunned(self, worker: WorkerInfo, verifier: str = "") -> bool:
        """Return whether all sessions shun a worker, or those of a verifier by its word."""
        return any(self._now() < self._entries.get(name, (0.0, 0.0))[1] for name in _names(worker, verifier))


def _names(worker: WorkerInfo, verifier: str) -> tuple[_Name, _Name]:
    return (worker.role, f"id {worker.worker_id}", verifier), (worker.role, f"at {worker.address}", verifier)
