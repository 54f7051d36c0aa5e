"""Workers that broke the protocol: each is left alone for a while, which grows with every further time."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from outrider.protocol.fleet import Role, WorkerInfo

log = structlog.get_logger(__name__)

FIRST_S = 5.0
GROWTH = 4.0
LONGEST_S = 900.0
FORGIVEN_AFTER = 10.0  # times as long as it was shunned, without another violation
_REMEMBERED = 4_096  # workers; whoever makes up more than these has the fleet's key

_Name = tuple[Role, str]


@dataclass(slots=True)
class _Entry:
    seconds: float = 0.0  # of the last time
    until: float = 0.0


class ShunnedWorkers:
    """Known by id and by address, so that a worker does not come back under another name in the same place.

    A worker that then keeps to the protocol for ten times as long starts
    anew.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.violations: Counter[Role] = Counter(dict.fromkeys(Role, 0))
        self._now = now
        self._entries: OrderedDict[_Name, _Entry] = OrderedDict()

    def report(self, worker: WorkerInfo, reason: str) -> None:
        """A worker has broken the protocol. Sessions that find out while it is shunned already add nothing."""
        self.violations[worker.role] += 1
        if self.shuns(worker):
            return
        now = self._now()
        known = [entry for name in _names(worker) if (entry := self._entries.get(name)) is not None]
        lately = max(
            (entry.seconds for entry in known if now < entry.until + FORGIVEN_AFTER * entry.seconds), default=0.0
        )
        seconds = min(LONGEST_S, lately * GROWTH) if lately else FIRST_S
        for name in _names(worker):
            self._entries[name] = _Entry(seconds, now + seconds)
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
        )

    def shuns(self, worker: WorkerInfo) -> bool:
        now = self._now()
        return any(now < entry.until for name in _names(worker) if (entry := self._entries.get(name)) is not None)


def _names(worker: WorkerInfo) -> tuple[_Name, _Name]:
    return (worker.role, f"id {worker.worker_id}"), (worker.role, f"at {worker.address}")
