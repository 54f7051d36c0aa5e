"""Seats at verifiers: which sessions may run now, by priority class and shared fairly among API keys.

Verifiers have a limited number of sessions and cache tokens; further sessions would wait there in one queue. With
several keys, or after the first request of another class than 0, they wait here instead, in one queue per class and
key.

A session that lost its verifier comes first, then the best class, and in it the key with the fewest seats. No key may
take all seats: see `quotas.within_share`. Each `AGEING_S` of waiting count as much as one class, so no class waits for
ever. Waiting changes the order of classes only: within one, keys have equal rights however long they wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from coordinator.admission.quotas import within_share
from coordinator.admission.waiting.forecast import Forecast, Line, Served
from coordinator.admission.waiting.urgency import Urgency
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.workers.worker_pool import WorkerPool
from outrider.protocol.statistics import GenerationStats

AGEING_S = 10.0
_POLL_S = 0.5  # verifiers join and leave without notification
_RESTART_S = 30.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a target's verifiers together; 0 seats: unknown."""

    seats: int
    tokens: int  # 0: no limit
    most: float = math.inf  # tokens of one verifier, which refuses a session of more at once


@dataclass(slots=True, eq=False)
class Seat:
    """Seat of one session, or its place in a queue."""

    tokens: int
    since: float  # -inf: before all others
    load: int = 0  # seats in use when it was taken
    waited_s: float = 0.0
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Usage:
    """Seats and tokens of one tenant, and how many of its sessions wait."""

    seats: int = 0
    tokens: int = 0
    waiting: int = 0


class Seats:
    """Seats of one target in use, and queues by class and tenant."""

    def __init__(self, capacity: Callable[[], Capacity], *, several: Callable[[], bool]) -> None:
        self._capacity, self._last, self._gone_at = capacity, Capacity(0, 0), 0.0
        self._several = several
        self._tenants: dict[str, _Usage] = {}
        self._queues: dict[tuple[int, str], deque[Seat]] = {}
        self._classes = False  # a request has named one
        self._forecast = Forecast()

    def _room(self) -> Capacity:
        """Return the capacity; while the last verifier may be restarting, what it was: queues keep their order."""
        if (capacity := self._capacity()).seats:
            self._last, self._gone_at = capacity, 0.0
            return capacity
        self._gone_at = self._gone_at or time.monotonic()
        return self._last if time.monotonic() - self._gone_at < _RESTART_S else capacity

    # Requests that have not begun.

    def check_in_time(self, tenant: str, urgency: Urgency, request: SessionRequest) -> None:
        """Raise Expired for a request that cannot be answered before its deadline."""
        if math.isfinite(urgency.deadline):
            self._forecast.check(request, self._line(tenant, urgency.priority), urgency.remaining_s)

    def _line(self, tenant: str, priority: int) -> Line:
        """Return where a new request would stand. Only its own key's requests are surely served before it."""
        seats, in_use = self._room().seats, self._used()[0]
        queued = [queue for (known, holder), queue in self._queues.items() if holder == tenant and known <= priority]
        ahead = in_use + sum(map(len, queued)) + 1 - seats if 0 < seats <= in_use else 0
        return Line(seats, in_use, ahead)

    def measure(self, seat: Seat, record: SessionRecord, stats: Callable[[], GenerationStats]) -> None:
        """Take the figures of a session that is about to leave, if it had this seat from its beginning to its end."""
        if not record.finished or not math.isfinite(seat.since):
            return
        seats, load = self._room().seats, max(seat.load, self._used()[0])
        # Beyond the capacity it waited at a verifier: nothing is known of its prefill.
        prompt = len(record.request.prompt) if seat.load <= seats else 0
        figures = Served.of(prompt, len(record.tokens), stats(), waited_s=seat.waited_s, load=min(load, seats))
        self._forecast.add(figures)

    # Sessions.

    @contextlib.asynccontextmanager
    async def taken(self, tenant: str, tokens: int, priority: int = 0, *, resumed: bool = False) -> AsyncIterator[Seat]:
        """Hold a seat for a session that may need cache for `tokens`; those `resumed` come first."""
        arrived = time.monotonic()
        seat = Seat(tokens, -math.inf if resumed else arrived)
        usage = self._tenants.setdefault(tenant, _Usage())
        self._classes = self._classes or priority != 0
        queue = self._queues.setdefault((priority, tenant), deque())
        (queue.appendleft if resumed else queue.append)(seat)
        usage.waiting += 1
        try:
            self._admit()
            while not seat.admitted.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await seat.admitted.wait()
                self._admit()
            seat.waited_s = time.monotonic() - arrived
            yield seat
        finally:
            if seat.admitted.is_set():
                usage.seats -= 1
                usage.tokens -= tokens
            else:
                self._leave((priority, tenant), seat)
            if not usage.seats and not usage.waiting:
                self._tenants.pop(tenant, None)
            asyncio.get_running_loop().call_soon(self._admit)  # one that lost its verifier comes again before that

    def _admit(self) -> None:
        """Admit waiting sessions while there is capacity."""
        capacity = self._room()
        while (key := self._next(capacity)) is not None:
            seat, usage = self._queues[key][0], self._tenants[key[1]]
            self._leave(key, seat)
            usage.seats += 1
            usage.tokens += seat.tokens
            seat.load = self._used()[0]
            seat.admitted.set()

    def _leave(self, key: tuple[int, str], seat: Seat) -> None:
        """Remove a session from its queue."""
        queue = self._queues[key]
        queue.remove(seat)
        self._tenants[key[1]].waiting -= 1
        if not queue:
            del self._queues[key]

    def _next(self, capacity: Capacity) -> tuple[int, str] | None:
        """Return the queue whose first session may run now."""
        for key in self._order():
            tokens, usage = self._queues[key][0].tokens, self._tenants[key[1]]
            if not self._fair(capacity, usage, tokens, usage.seats, usage.tokens):
                continue  # it waits for its own key's sessions, whatever others leave
            if not self._fits(capacity, tokens):
                return None  # the next free tokens are for this session, not for one that needs fewer
            if self._fair(capacity, usage, tokens, *self._used()):
                return key
        return None

    def _order(self) -> list[tuple[int, str]]:
        """Return the queues: resumed sessions first, then the best class, in it the tenant with the fewest seats."""
        since = {key: queue[0].since for key, queue in self._queues.items()}
        fair = sorted(since, key=lambda key: (since[key] == -math.inf, self._tenants[key[1]].seats))
        ranks: dict[int, float] = {}
        for key in fair:
            ranks.setdefault(key[0], key[0] * AGEING_S + since[key])
        return sorted(fair, key=lambda key: (ranks[key[0]] if since[key] > -math.inf else -math.inf, key[0]))

    def _fits(self, capacity: Capacity, tokens: int) -> bool:
        seats, used = self._used()
        if not seats or not capacity.seats or not (self._several() or self._classes):
            return True  # a single session may have any size: its verifier accepts or refuses it
        return seats < capacity.seats and (used + tokens <= (capacity.tokens or math.inf) or tokens > capacity.most)

    def _fair(self, capacity: Capacity, usage: _Usage, tokens: int, seats: int, used: int) -> bool:
        """Return whether a tenant may have one more session while so many seats and tokens are in use."""
        if not usage.seats or not capacity.seats or not self._several():
            return True
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
    return Capacity(sum(info.capacity for info in verifiers), sum(tokens) if all(tokens) else 0, max(tokens, default=0))
