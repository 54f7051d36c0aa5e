"""Which sessions are at a verifier now: fair among API keys.

A verifier serves so many sessions, with so many tokens in its cache; what is
beyond that would wait there in one line. With several keys it waits here
instead, in a line for each key, and the key that holds least comes first. A
key never takes all: see `quotas.within_share`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from coordinator.admission.quotas import within_share
from coordinator.workers.worker_pool import WorkerPool
from outrider.protocol.fleet import Role

_LOOK_EVERY_S = 0.5  # verifiers come and go without a word to those who wait


@dataclass(frozen=True, slots=True)
class Room:
    """At all verifiers together; no seats: nobody knows."""

    seats: int
    tokens: int  # 0: no limit


@dataclass(slots=True, eq=False)
class _Waiting:
    tokens: int
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Occupied:
    """By one tenant."""

    seats: int = 0
    tokens: int = 0
    line: deque[_Waiting] = field(default_factory=deque)


class Seats:
    def __init__(self, room: Callable[[], Room], *, several: Callable[[], bool]) -> None:
        self._room = room
        self._several = several
        self._tenants: dict[str, _Occupied] = {}

    @contextlib.asynccontextmanager
    async def taken(self, tenant: str, tokens: int, *, going_on: bool = False) -> AsyncIterator[None]:
        """Around the time at a verifier of a session that may come to need room for `tokens`.

        `going_on`: it has lost its verifier in the middle, and comes before those of its tenant that have yet to begin.
        """
        if not self._several():
            yield
            return
        waiting = _Waiting(tokens)
        held = self._tenants.setdefault(tenant, _Occupied())
        if going_on:
            held.line.appendleft(waiting)
        else:
            held.line.append(waiting)
        try:
            self._let_in()
            while not waiting.admitted.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await waiting.admitted.wait()
                self._let_in()
            yield
        finally:
            if waiting.admitted.is_set():
                held.seats -= 1
                held.tokens -= tokens
            else:
                held.line.remove(waiting)
            if not held.seats and not held.line:
                self._tenants.pop(tenant, None)
            self._let_in()

    def _let_in(self) -> None:
        """As many as there is room for, of the tenant that holds least first."""
        room = self._room()
        waiting = sorted((held for held in self._tenants.values() if held.line), key=lambda held: held.seats)
        while waiting:
            held = waiting[0]
            tokens = held.line[0].tokens
            if not self._fits(room, tokens):
                return  # the next that leaves makes room for this one, not for somebody who needs less
            if not self._fair(room, held, tokens):
                waiting.pop(0)
                continue
            held.seats += 1
            held.tokens += tokens
            held.line.popleft().admitted.set()
            waiting = sorted((held for held in waiting if held.line), key=lambda held: held.seats)

    def _fits(self, room: Room, tokens: int) -> bool:
        seats, held = self._used()
        if not seats or not room.seats:
            return True  # a lone session may be as large as it likes: its verifier says what it thinks of that
        return seats < room.seats and (not room.tokens or held + tokens <= room.tokens)

    def _fair(self, room: Room, held: _Occupied, tokens: int) -> bool:
        if not held.seats or not room.seats:
            return True
        seats, used = self._used()
        return within_share(held.seats + 1, room.seats - seats - 1) and (
            not room.tokens or within_share(held.tokens + tokens, room.tokens - used - tokens)
        )

    def _used(self) -> tuple[int, int]:
        everybody = self._tenants.values()
        return sum(held.seats for held in everybody), sum(held.tokens for held in everybody)


def room_at(roster: WorkerPool) -> Room:
    """What the verifiers say that they have."""
    there = [link.info for link in roster.links() if link.info.role is Role.VERIFIER and not link.info.draining]
    tokens = [info.load.kv_tokens_total for info in there]
    return Room(sum(info.capacity for info in there), sum(tokens) if all(tokens) else 0)
