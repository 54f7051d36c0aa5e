"""What each API key may use: sessions at once, requests and tokens a minute.

One coordinator counts what goes through it. Among several keys none may take
all: a key holds at most `SHARE` times as many sessions as are left free, so
there is always room for another, however many keys there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.settings import CoordinatorSettings
from outrider.protocol.errors import Overloaded
from outrider.security.tenants import Tenant, TenantLimits

SHARE = 3
_MINUTE_S = 60.0
_AGAIN_MS = 1000


def within_share(held: int, free: int) -> bool:
    """Whether one of several tenants may hold so much while so much is left free."""
    return held <= SHARE * free


class TokenBucket:
    """So much a minute, and as much at once; what was used beyond it is paid back first."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = time.monotonic()

    def take(self, amount: int) -> None:
        self._refill()
        self._level -= amount

    def wait_s(self, amount: int = 1) -> float:
        """How long until so much is there."""
        if not self.per_minute:
            return 0.0
        self._refill()
        return max(0.0, (min(amount, self.per_minute) - self._level) * _MINUTE_S / self.per_minute)

    def _refill(self) -> None:
        now = time.monotonic()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / _MINUTE_S)
        self._at = now


@dataclass(frozen=True, slots=True)
class _KeyUsage:
    limits: TenantLimits
    requests: TokenBucket
    tokens: TokenBucket
    max_sessions: int


class Quotas:
    def __init__(self, settings: CoordinatorSettings, *, several: Callable[[], bool]) -> None:
        """`several`: whether there is more than one tenant."""
        self._settings = settings
        self._several = several
        self._accounts: dict[str, _KeyUsage] = {}

    def admit(self, tenant: Tenant, held: int, live: int) -> None:
        """Take one more session of a tenant that holds `held` of `live`. Raises Overloaded."""
        limit = self._settings.max_sessions
        account = self._account(tenant, anew=True)
        if live >= limit:
            raise _full("sessions", f"{live} sessions are going on", live, limit)
        if account.max_sessions and held >= account.max_sessions:
            raise _full("key.max_sessions", f"{held} sessions of this key are going on", held, account.max_sessions)
        if self._several() and not within_share(held + 1, limit - live - 1):
            raise _full("key.sessions", f"{held} sessions of this key are going on, of {live}", held, "a fair share")
        _within("requests_per_minute", account.requests)
        _within("tokens_per_minute", account.tokens)
        account.requests.take(1)

    def spend(self, tenant: Tenant, tokens: int) -> None:
        self._account(tenant).tokens.take(tokens)

    def _account(self, tenant: Tenant, *, anew: bool = False) -> _KeyUsage:
        """`anew`: the tenant is as the keys have it now, and its limits may be others than before."""
        account = self._accounts.get(tenant.id)
        if account is None or (anew and account.limits != tenant.limits):
            given, settings = tenant.limits, self._settings
            account = self._accounts[tenant.id] = _KeyUsage(
                given,
                TokenBucket(_either(given.requests_per_minute, settings.default_requests_per_minute)),
                TokenBucket(_either(given.tokens_per_minute, settings.default_tokens_per_minute)),
                _either(given.max_sessions, settings.default_max_sessions),
            )
        return account


def _either(given: int | None, default: int) -> int:
    return default if given is None else given


def _within(name: str, bucket: TokenBucket) -> None:
    if (wait_s := bucket.wait_s()) > 0:
        raise Overloaded(
            f"this key has used its {bucket.per_minute} {name.replace('_', ' ')}",
            field=f"key.{name}",
            limit=bucket.per_minute,
            retry_after_ms=max(1, int(1000 * wait_s)),
        )


def _full(field: str, message: str, value: int, limit: int | str) -> Overloaded:
    return Overloaded(f"{message}; at most {limit}", field=field, value=value, limit=limit, retry_after_ms=_AGAIN_MS)
