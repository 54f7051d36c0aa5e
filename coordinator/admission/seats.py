"""Seats at verifiers: which sessions may run now, shared fairly among API keys.

Verifiers have a limited number of sessions and cache tokens; further sessions would wait there in one queue. With
several keys they wait here instead, in one queue per key. The key with the fewest seats comes first. No key may take
all seats: see `quotas.within_share`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from coordinator.admission.quotas import within_share
from coordinator.workers.worker_pool import WorkerPool

_POLL_S = 0.5  # verifiers join and leave without notification


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a target's verifiers together; 0 seats: unknown."""

    seats: int
    tokens: int  # 0: no limit


@dataclass(slots=True, eq=False)
class _Waiting:
    tokens: int
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Usage:
    """Seats, tokens and queue of one tenant."""

    seats: int = 0
    tokens: int = 0
    queue: deque[_Waiting] = field(default_factory=deque)


class Seats:
    """Seats in use and queues, by tenant."""

    def __init__(self, capacity: Callable[[], Capacity], *, several: Callable[[], bool]) -> None:
        self._capacity = capacity
        self._several = several
        self._tenants: dict[str, _Usage] = {}

    @contextlib.asynccontextmanager
    async def taken(self, tenant: str, tokens: int, *, resumed: bool = False) -> AsyncIterator[None]:
        """Hold a seat for a session that may need cache for `tokens`; wait for it if necessary.

        `resumed` sessions have lost their verifier; they come before new ones of their tenant.
        """
        if not self._several():
            yield
            return
        waiting = _Waiting(tokens)
        usage = self._tenants.setdefault(tenant, _Usage())
        if resumed:
            usage.queue.appendleft(waiting)
        else:
            usage.queue.append(waiting)
        try:
            self._admit()
            while not waiting.admitted.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await waiting.admitted.wait()
                self._admit()
            yield
        finally:
            if waiting.admitted.is_set():
                usage.seats -= 1
                usage.tokens -= tokens
            else:
                usage.queue.remove(waiting)
            if not usage.seats and not usage.queue:
                self._tenants.pop(tenant, None)
            self._admit()

    def _admit(self) -> None:
        """Admit waiting sessions while there is capacity, those of the tenant with the fewest seats first."""
        capacity = self._capacity()
        waiting = sorted((usage for usage in self._tenants.values() if usage.queue), key=lambda usage: usage.seats)
        while waiting:
            usage = waiting[0]
            tokens = usage.queue[0].tokens
            if not self._fits(capacity, tokens):
                return  # the next free tokens are for this session, not for one that needs fewer
            if not self._fair(capacity, usage, tokens):
                waiting.pop(0)
                continue
            usage.seats += 1
            usage.tokens += tokens
            usage.queue.popleft().admitted.set()
            waiting = sorted((usage for usage in waiting if usage.queue), key=lambda usage: usage.seats)

    def _fits(self, capacity: Capacity, tokens: int) -> bool:
        seats, used = self._used()
        if not seats or not capacity.seats:
            return True  # a single session may have any size: its verifier accepts or refuses it
        return seats < capacity.seats and (not capacity.tokens or used + tokens <= capacity.tokens)

    def _fair(self, capacity: Capacity, usage: _Usage, tokens: int) -> bool:
        if not usage.seats or not capacity.seats:
            return True
        seats, used = self._used()
        return within_share(usage.seats + 1, capacity.seats - seats - 1) and (
            not capacity.tokens or within_share(usage.tokens + tokens, capacity.tokens - used - tokens)
        )

    def _used(self) -> tuple[int, int]:
        tenants = self._tenants.values()
        return sum(usage.seats for usage in tenants), sum(usage.tokens for usage in tenants)


def capacity_of(worker_pool: WorkerPool, target: str) -> Capacity:
    """Return the capacity that a target's verifiers report."""
    verifiers = [each.info for each in worker_pool.verifiers(target) if not each.info.draining]
    tokens = [info.load.kv_tokens_total for info in verifiers]
    return Capacity(sum(info.capacity for info in verifiers), sum(tokens) if all(tokens) else 0)
