"""Urgency of a request: its priority class, and the time by which it must be answered.

The edges set it for a call's task, as they set the tenant. Sessions that the call starts read it with `urgency()`.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass

from coordinator.persistence.session_record import MAX_PRIORITY
from outrider.protocol.errors import Expired, InvalidRequest
from outrider.security.tenants import tenant

TIMEOUT_HEADER = "X-Request-Timeout"
MAX_TIMEOUT_S = 86_400
_NUMBER = re.compile(r"\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Urgency:
    """Class of a request, the lowest first, and its deadline on the monotonic clock."""

    priority: int = 0
    deadline: float = math.inf

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    async def wait(self, changed: asyncio.Event) -> None:
        """Wait until something is `changed`; raise Expired at the deadline."""
        try:
            async with asyncio.timeout(self.remaining_s if math.isfinite(self.deadline) else None):
                await changed.wait()
        except TimeoutError:
            raise Expired("the request waited until its deadline", field="timeout", retry_after_ms=1000) from None


_CURRENT: ContextVar[Urgency | None] = ContextVar("urgency", default=None)


def set_urgency(priority: int | None, timeout_s: float | None) -> None:
    """Set the urgency of this task's call; raise InvalidRequest for a class that its API key may not ask for."""
    limits = tenant().limits
    usual = limits.priority or 0
    best = usual if limits.best_priority is None else limits.best_priority
    if not tenant().id:
        best = -MAX_PRIORITY  # without API keys there are no others to pass
    if priority is not None and not best <= priority <= MAX_PRIORITY:
        raise InvalidRequest.of("priority", priority, f"in [{best}, {MAX_PRIORITY}]")
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    _CURRENT.set(Urgency(usual if priority is None else priority, deadline))


def urgency() -> Urgency:
    """Return the urgency of this task's call; without one, its API key's class and no deadline."""
    return _CURRENT.get() or Urgency(tenant().limits.priority or 0)


def timeout_of(header: str | None) -> float | None:
    """Return the seconds that a client gives in its header."""
    if header is None:
        return None
    seconds = float(header) if _NUMBER.fullmatch(header) else math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest.of(TIMEOUT_HEADER, ascii(header), f"a number of seconds in (0, {MAX_TIMEOUT_S}]")
    return seconds
