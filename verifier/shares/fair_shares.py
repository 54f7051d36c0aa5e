"""Fair shares of step time between tenants with few sessions and tenants with many.

Every session in a step makes the step a little longer. Among tenants with similar numbers of sessions that is fair. A
tenant with few sessions keeps its speed instead. Tenants with many get a small part of the verifier's time, as credit
in milliseconds, and pay for the time that their tokens add to steps. Where more tokens take no more time, they pay
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from verifier.step_times import StepTimes

FEW_DIVISOR = 8  # few sessions: at most this fraction of a tenant's even share of the seats
QUIET_S = 0.1  # a tenant idle for this long is not delayed noticeably by one short step
_SHORT_STEP = 1.25  # times the shortest step
_MAX_CREDIT_MS = 100.0


class FairShares:
    """Credit account of the tenants with many sessions."""

    def __init__(self, times: StepTimes, seats: int, stretch: float) -> None:
        """Initialise the account; steps of tenants with few sessions may take `stretch` times as long."""
        self._times = times
        self._seats = seats
        self._stretch = stretch
        self._credit_ms = self._credited_at = 0.0
        self.heavy: frozenset[str] = frozenset()
        self._light_served_at = 0.0  # last step with sessions of tenants with few

    def heavy_tenants(self, tenants: Sequence[str]) -> frozenset[str]:
        """Return the tenants with many sessions, given each session's tenant; none if no tenant has few."""
        counts = Counter(tenants) if len(set(tenants)) > 1 else {}
        few = max(1, self._seats // (FEW_DIVISOR * max(1, len(counts))))
        heavy = frozenset(tenant for tenant, count in counts.items() if count > few)
        self.heavy = heavy if len(heavy) < len(counts) else frozenset()
        return self.heavy

    def reset(self, now: float) -> None:
        """Clear the credit while no tenant has few sessions."""
        self._credit_ms, self._credited_at, self._light_served_at = 0.0, now, now

    def budget(self, now: float, tokens: int, max_tokens: int) -> int:
        """Return how many tokens of heavy tenants may join a step with `tokens` of light ones."""
        self._credit_ms = min(_MAX_CREDIT_MS, self._credit_ms + 1000 * (now - self._credited_at) * (self._stretch - 1))
        self._credited_at = now
        if tokens:
            self._light_served_at = now
        if not self._times.known:
            return tokens
        allowed_ms = self._credit_ms
        if not tokens and now - self._light_served_at > QUIET_S:
            allowed_ms = max(allowed_ms, _SHORT_STEP * self._times.step_ms(1))
        return self._times.extra_tokens(tokens, allowed_ms, max_tokens) if allowed_ms > 0 else 0

    def charge(self, tokens_by_tenant: Sequence[tuple[str, int]], ms: float) -> None:
        """Charge the heavy tenants in a step for the time that they added to it."""
        if any(tenant in self.heavy for tenant, _ in tokens_by_tenant):
            light = sum(count for tenant, count in tokens_by_tenant if tenant not in self.heavy)
            alone_ms = self._times.step_ms(light) if light and self._times.known else 0.0
            self._credit_ms = max(-_MAX_CREDIT_MS, self._credit_ms - (ms - alone_ms))
