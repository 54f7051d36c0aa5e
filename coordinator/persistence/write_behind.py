"""Write-behind of session records to Redis: batched, retried, outside the token path.

Each batch writes a changed session once, so that no session delays another. Without Redis a batch is a few attempts.
Sessions that have ended wait as long as they are remembered. What Redis lost is written again in full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from coordinator.persistence.redis_connection import MAX_CONNECTIONS, StoreDown
from coordinator.persistence.session_record import SessionRecord
from coordinator.persistence.store import Store
from outrider.base.aio import until
from outrider.observability.request_context import current

log = structlog.get_logger(__name__)

BATCH_S = 0.1  # a write takes 0.15 ms of the event loop that relays tokens, and cores that a step may be using
MAX_BATCH_S = 0.5  # with many sessions
SESSIONS_PER_S = 200  # written at most, until batches wait MAX_BATCH_S
RETRY_S = 0.25
FIRST_WRITE_S = 0.25
FIRST_WRITE_DOWN_S = 0.05  # while Redis does not answer


class Entry:
    """State of one session in Redis."""

    def __init__(self, record: SessionRecord, on_fenced: Callable[[bool], None]) -> None:
        self.record = record
        self.on_fenced = on_fenced  # with whether another coordinator has cancelled it
        self.durable = 0  # output tokens that are in Redis
        self.known = False  # the request is in Redis
        self.finish_written = False
        self.in_doubt = False  # another coordinator may own it, and nothing has been written for long
        self.opening = False  # such a write is in progress, see `WriteBehind.write_first`
        self.request_id = current().request_id

    @property
    def current(self) -> bool:
        written = self.known and not self.in_doubt and self.durable == len(self.record.tokens)
        return written and (self.finish_written or not self.record.finished)


class WriteBehind:
    """Queue of changed sessions and the task that writes them."""

    def __init__(self, store: Store, is_kept: Callable[[str], bool]) -> None:
        """Start empty; without Redis only sessions that are kept wait for it."""
        self._store, self._is_kept = store, is_kept
        self._dirty: dict[str, Entry] = {}
        self._pause_s = BATCH_S  # before the next batch

    @property
    def unwritten(self) -> int:
        """Return the number of sessions with changes that Redis lacks."""
        return len(self._dirty)

    def mark_changed(self, entry: Entry) -> None:
        self._dirty[entry.record.session_id] = entry

    async def write_first(self, entry: Entry, failed: str = "session started without redis") -> None:
        """Write a session before its id or its end is sent; without an answer in time, log it and write later."""
        # A single slow answer marks Redis as down, although it may accept the next write.
        seconds = FIRST_WRITE_S if self._store.up else FIRST_WRITE_DOWN_S
        entry.opening = True
        try:
            async with asyncio.timeout(seconds):
                if await self._write(entry) and not entry.known:  # Redis has lost it: now as a whole
                    await self._write(entry)
        except (StoreDown, TimeoutError) as error:
            log.warning(failed, session_id=entry.record.session_id, error=str(error) or f"no answer in {seconds:g} s")
        finally:
            entry.opening = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            await self._write_batch()
            if not self._store.up:
                await asyncio.sleep(RETRY_S)

    async def flush(self, seconds: float) -> bool:
        """Wait until `run` has written all changes; return False if that takes longer than `seconds`."""
        return await until(lambda: not self._dirty, seconds)

    async def _write_batch(self) -> None:
        batch = list(self._dirty.values())
        self._pause_s = min(MAX_BATCH_S, max(BATCH_S, len(batch) / SESSIONS_PER_S))
        for start in range(0, len(batch), MAX_CONNECTIONS):
            if not any(await asyncio.gather(*map(self._update, batch[start : start + MAX_CONNECTIONS]))):
                # Thousands of attempts would take seconds of the event loop.
                self._dirty = {name: entry for name, entry in self._dirty.items() if self._is_kept(name)}
                return

    async def _update(self, entry: Entry) -> bool:
        """Write a session's changes; return False if Redis does not take them."""
        name, done, answered = entry.record.session_id, False, True
        try:
            if not entry.opening:  # else checked again later: the first write may fail
                owned = entry.current or await self._write(entry)
                done = entry.current or not owned
        except StoreDown:
            answered = False
        if self._dirty.get(name) is entry:
            del self._dirty[name]
            if not done:
                self._dirty[name] = entry  # behind the others
        return answered

    async def _write(self, entry: Entry) -> bool:
        """Write the changes of a session; return False if another coordinator owns it now."""
        record, entry.in_doubt = entry.record, False
        start, end, finished = entry.durable, len(record.tokens), record.finished
        answer = await self._store.write(record, start, end, whole=not entry.known)
        if answer in ("FENCED", "CANCELLED"):
            entry.on_fenced(answer == "CANCELLED")
        if answer == "FENCED":
            return False
        if answer in ("OK", "CANCELLED"):
            entry.known, entry.durable = True, end
            entry.finish_written = finished or answer == "CANCELLED"
        else:
            named = {"session_id": record.session_id, "request_id": entry.request_id}
            log.info("session lost by redis, writing it again", **named, answer=answer)
            entry.known, entry.durable = False, 0
        return True
