"""Tenants: the holders of API keys. A tenant cannot access what belongs to another.

The edges (`auth_interceptor` for gRPC, `coordinator.api.http.limits` for HTTP) set the
tenant of a call by its key; the code below them reads it with `tenant()`.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from structlog.contextvars import bind_contextvars

_ID_DIGITS = 12


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Quotas of one tenant. None: the default of all keys; 0: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs together
    max_sessions: int | None = None  # at once
    priority: int | None = None  # class of requests that name none; None: 0
    best_priority: int | None = None  # lowest number that a request may name; None: the same


@dataclass(frozen=True, slots=True)
class Tenant:
    """Holder of API keys. `id` is the key's name, else a part of its digest; empty if no keys are required."""

    id: str = ""
    limits: TenantLimits = TenantLimits()

    @classmethod
    def of_key(cls, key: str, name: str = "", limits: TenantLimits | None = None) -> Tenant:
        return cls(name or f"key-{hashlib.sha256(key.encode()).hexdigest()[:_ID_DIGITS]}", limits or TenantLimits())

    def salt(self, given: str) -> str:
        """Separate the cached prefixes of this tenant from those of others; `given` separates within the tenant."""
        return hashlib.sha256(f"cache\0{self.id}\0{given}".encode()).hexdigest()[:32] if self.id else given

    def idempotency_key(self, given: str) -> str:
        return f"{self.id}\0{given}" if self.id else given


NO_TENANT = Tenant()
_CURRENT: ContextVar[Tenant] = ContextVar("tenant", default=NO_TENANT)


def set_tenant(tenant: Tenant) -> None:
    """Set the tenant of a call, in the call's own task, and add it to the task's log lines."""
    _CURRENT.set(tenant)
    if tenant.id:
        bind_contextvars(tenant=tenant.id)


def tenant() -> Tenant:
    """Return the tenant of this task's call."""
    return _CURRENT.get()
