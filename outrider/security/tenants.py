"""Tenants: the holders of API keys. What belongs to one is closed to the others.

The edges (`auth_interceptor` for gRPC, `coordinator.api.http.limits` for HTTP) find the
tenant by the key of a call; everything that the call leads to asks `tenant()`.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from structlog.contextvars import bind_contextvars

_ID_DIGITS = 12


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: the default of all keys; 0: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs together
    max_sessions: int | None = None  # at once


@dataclass(frozen=True, slots=True)
class Tenant:
    """`id` is the name of the key, else a part of its digest; empty where no keys are asked for."""

    id: str = ""
    limits: TenantLimits = TenantLimits()

    @classmethod
    def of_key(cls, key: str, name: str = "", limits: TenantLimits | None = None) -> Tenant:
        return cls(name or f"key-{hashlib.sha256(key.encode()).hexdigest()[:_ID_DIGITS]}", limits or TenantLimits())

    def salt(self, given: str) -> str:
        """Separate the cached prefixes of this tenant from those of others; `given` separates within the tenant."""
        if not self.id:
            return given
        return hashlib.sha256(f"cache\0{self.id}\0{given}".encode()).hexdigest()[:32]

    def idempotency_key(self, given: str) -> str:
        return f"{self.id}\0{given}" if self.id else given


ANYBODY = Tenant()
_HERE: ContextVar[Tenant] = ContextVar("tenant", default=ANYBODY)


def act_for(tenant: Tenant) -> None:
    """Set the tenant of a call, in the call's own task. Log lines name it from now on."""
    _HERE.set(tenant)
    if tenant.id:
        bind_contextvars(tenant=tenant.id)


def tenant() -> Tenant:
    """Return the tenant of the call that this task works for."""
    return _HERE.get()
