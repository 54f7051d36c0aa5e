"""What a step takes of whom, where a tenant with many sessions meets one with few.

Every session in a step makes it a little longer. Among tenants with about as
many sessions that is fair. A tenant with few keeps its speed instead: those
with many get a small part of the verifier's time, as credit in milliseconds,
and pay with it for what their tokens add to the steps. Where more tokens cost
nothing more, they pay nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from verifier.step_budget import Pace

FEW = 8  # a tenant has few sessions that has at most one in so many of its even share of the seats
QUIET_S = 0.1  # who lets sessions wait for so long is not slowed by a short step in between
_SHORT = 1.25  # times as long as the shortest
_MAX_CREDIT_MS = 100.0


class FairShares:
    def __init__(self, pace: Pace, seats: int, stretch: float) -> None:
        """`stretch`: how many times as long others may make the steps of a tenant with few sessions."""
        self._pace = pace
        self._seats = seats
        self._stretch = stretch
        self._credit_ms = 0.0
        self._at = 0.0
        self._many: frozenset[str] = frozenset()
        self._served = 0.0  # when a step last had sessions of a tenant with few

    def many(self, tenants: Iterable[str]) -> frozenset[str]:
        """Return the tenants, of those of all sessions, that have many; none: there is nobody to keep them from."""
        counts = Counter(tenants)
        few = max(1, self._seats // (FEW * max(1, len(counts))))
        many = frozenset(tenant for tenant, count in counts.items() if count > few)
        self._many = many if len(many) < len(counts) else frozenset()
        return self._many

    def unlimited(self, now: float) -> None:
        """Nobody with few sessions is here."""
        self._credit_ms, self._at, self._served = 0.0, now, now

    def room(self, now: float, rows: int, most: int) -> int:
        """How many tokens of tenants with many sessions may join a step with `rows` of those with few."""
        self._credit_ms = min(_MAX_CREDIT_MS, self._credit_ms + 1000 * (now - self._at) * (self._stretch - 1))
        self._at = now
        if rows:
            self._served = now
        if not self._pace.known:
            return rows
        allowed_ms = self._credit_ms
        if not rows and now - self._served > QUIET_S:
            allowed_ms = max(allowed_ms, _SHORT * self._pace.ms(1))
        return self._pace.more_rows(rows, allowed_ms, most) if allowed_ms > 0 else 0

    def took(self, work: Sequence[tuple[str, int]], ms: float) -> None:
        """After a step with so many tokens of each of these tenants: who joined pays for what came on top."""
        rows = sum(count for tenant, count in work if tenant not in self._many)
        if self._many and any(tenant in self._many for tenant, _ in work):
            alone_ms = self._pace.ms(rows) if rows and self._pace.known else 0.0
            self._credit_ms = max(-_MAX_CREDIT_MS, self._credit_ms - (ms - alone_ms))
