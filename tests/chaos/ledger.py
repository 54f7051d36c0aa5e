"""Ledger of faults and of what clients observed, by one monotonic clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

SHORT_S = 0.05  # shorter gaps are not distinguished
SETTLES_S = 10.0  # after a Redis fault, until all records are stored again
MAX_KEPT = 50
_HOLDS_SESSIONS = ("redis",)  # targets whose faults may lose a session's record


@dataclass(slots=True)
class Fault:
    kind: str
    target: str
    alone: bool
    start: float
    end: float = float("inf")
    up: float = float("inf")  # when the target served again

    @property
    def name(self) -> str:
        """Return the key for statistics: the kind, and the role of the target."""
        return f"{self.kind} {self.target.split('-')[0]}"

    @property
    def of_redis(self) -> bool:
        return any(part in self.target for part in _HOLDS_SESSIONS)


@dataclass(slots=True)
class Talk:
    """Timeline of one session at its client, with the start of the current wait."""

    kind: str
    began: float
    paced: bool = False  # by its client, or received at once: its gaps are not measured
    last: float = 0.0
    ended: float = float("inf")
    gaps: list[tuple[float, float]] = field(default_factory=list)

    def heard(self) -> None:
        now = time.monotonic()
        if now - self.last >= SHORT_S:
            self.gaps.append((self.last, now))
        self.last = now

    def longest(self, start: float, end: float) -> float:
        """Return the longest gap that overlaps this time."""
        return max((b - a for a, b in self.gaps if a <= end and b >= start), default=SHORT_S)


class Ledger:
    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self._say = say
        self.faults: list[Fault] = []
        self.talks: list[Talk] = []
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.lost_by_design: list[str] = []
        self.began = time.monotonic()

    def fault(self, kind: str, target: str, *, alone: bool = False) -> Fault:
        self.faults.append(Fault(kind, target, alone, time.monotonic()))
        return self.faults[-1]

    def talk(self, kind: str, *, paced: bool = False) -> Talk:
        now = time.monotonic()
        self.talks.append(Talk(kind, now, paced, now))
        return self.talks[-1]

    def wrong(self, what: str, count: int, told: str) -> None:
        """Record a violation; `what` is wrong, lost, doubled, error, hang, ..."""
        self.counts[what] += count
        line = self.note(f"{what}: {told}")
        if len(self.violations) < MAX_KEPT:
            self.violations.append(line)

    def note(self, told: str) -> str:
        """Write to the campaign's log, with the time."""
        line = f"{time.monotonic() - self.began:7.1f} s  {told}"
        self._say(line)
        return line

    def may_be_lost(self, talk: Talk) -> bool:
        """Return whether a Redis fault overlaps the session: Redis may not have stored it."""
        return any(fault.of_redis and fault.end + SETTLES_S >= talk.began for fault in self.faults)
