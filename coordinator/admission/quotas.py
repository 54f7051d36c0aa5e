"""Quotas of API keys: concurrent sessions, requests and tokens per minute.

Each coordinator counts its own requests. With several keys, a key may hold at most `SHARE` times as many sessions as
are free, so that another key can always start one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.protocol.errors import Overloaded, Unavailable
from outrider.security.tenants import Tenant, TenantLimits
from outrider.settings.coordinator import CoordinatorSettings

SHARE = 3
_MINUTE_S = 60.0
_RETRY_MS = 1000


def within_share(held: int, free: int) -> bool:
    """Return whether one of several tenants may hold this much while this much is free."""
    return held <= SHARE * free


class TokenBucket:
    """Token bucket of one minute's amount, kept as the time at which it is full again (generic cell rate algorithm).

    Use beyond the amount moves that time on, which delays the next use.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute  # 0: no limit
        self._full_at = 0.0

    def take(self, amount: int) -> None:
        if self.per_minute:
            self._full_at = max(time.monotonic(), self._full_at) + amount * _MINUTE_S / self.per_minute

    def wait_s(self) -> float:
        """Return the seconds until there is one to take."""
        if not self.per_minute:
            return 0.0
        full_but_one_at = self._full_at - _MINUTE_S * (1 - 1 / self.per_minute)
        return max(0.0, full_but_one_at - time.monotonic())


@dataclass(frozen=True, slots=True)
class _KeyUsage:
    limits: TenantLimits
    requests: TokenBucket
    tokens: TokenBucket
    max_sessions: int


class Quotas:
    """Usage and limits by tenant."""

    def __init__(self, settings: CoordinatorSettings, *, several: Callable[[], bool]) -> None:
        """Start without usage; `several` returns whether there is more than one tenant."""
        self._settings = settings
        self._several = several
        self._usages: dict[str, _KeyUsage] = {}

    def admit(self, tenant: Tenant, held: int, live: int) -> None:
        """Count a new session of a tenant that holds `held` of `live`; raise Overloaded beyond a limit."""
        limit = self._settings.max_sessions
        usage = self._usage(tenant)
        if live >= limit:
            raise full("sessions", f"{live} sessions are running", live, limit)
        if usage.max_sessions and held >= usage.max_sessions:
            raise full("key.max_sessions", f"{held} sessions of this key are running", held, usage.max_sessions)
        if held and self._several() and not within_share(held + 1, limit - live - 1):
            raise full("key.sessions", f"{held} sessions of this key are running, of {live}", held, "a fair share")
        _within("requests_per_minute", usage.requests)
        _within("tokens_per_minute", usage.tokens)
        usage.requests.take(1)

    def admit_takeover(self, tenant: Tenant, held: int, live: int) -> None:
        """Raise Unavailable beyond twice the limits: sessions of a failed coordinator are accepted above them."""
        limit, own = 2 * self._settings.max_sessions, 2 * self._usage(tenant).max_sessions
        unfair = held and self._several() and not within_share(held + 1, limit - live - 1)
        if live >= limit or 0 < own <= held or unfair:
            raise Unavailable(f"{live} sessions are running here", retry_after_ms=1000)

    def spend(self, tenant: Tenant, tokens: int) -> None:
        (self._usages.get(tenant.id) or self._usage(tenant)).tokens.take(tokens)

    def _usage(self, tenant: Tenant) -> _KeyUsage:
        """Return a tenant's usage, which starts anew with changed limits of its key."""
        usage = self._usages.get(tenant.id)
        if usage is None or usage.limits != tenant.limits:
            given, settings = tenant.limits, self._settings
            usage = self._usages[tenant.id] = _KeyUsage(
                given,
                TokenBucket(_either(given.requests_per_minute, settings.default_requests_per_minute)),
                TokenBucket(_either(given.tokens_per_minute, settings.default_tokens_per_minute)),
                _either(given.max_sessions, settings.default_max_sessions),
            )
        return usage


def _either(given: int | None, default: int) -> int:
    return default if given is None else given


def _within(name: str, bucket: TokenBucket) -> None:
    if (wait_s := bucket.wait_s()) > 0:
        message = f"this key has used its {bucket.per_minute} {name.replace('_', ' ')}"
        wait_ms = max(1, int(1000 * wait_s))
        raise Overloaded(message, field=f"key.{name}", limit=bucket.per_minute, retry_after_ms=wait_ms)


def full(field: str, message: str, value: int, limit: int | str) -> Overloaded:
    return Overloaded(f"{message}; at most {limit}", field=field, value=value, limit=limit, retry_after_ms=_RETRY_MS)
