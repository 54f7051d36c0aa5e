"""Write-behind of sessions: batched, retried, off the token path.

Sessions say that they changed; the journal brings Redis up to date, one write
a session and batch, so that a session that grows without end keeps no other
waiting. While Redis is away changes pile up as nothing more than names, and
what Redis lost is written again whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from coordinator.persistence.session_record import SessionRecord
from coordinator.persistence.store import Store, StoreDown
from outrider.observability.request_context import current

log = structlog.get_logger(__name__)

BATCH_S = 0.01
RETRY_S = 0.25
OPEN_S = 0.25
OPEN_AWAY_S = 0.05


class Entry:
    """What Redis has of one session."""

    def __init__(self, record: SessionRecord, on_fenced: Callable[[], None], durable: int = 0) -> None:
        self.record = record
        self.on_fenced = on_fenced
        self.durable = durable  # output tokens that are in Redis
        self.known = durable > 0  # the request is in Redis
        self.finish_written = False
        self.opening = False  # its first write is under way, see `WriteBehind.opened`
        self.request_id = current().request_id

    @property
    def current(self) -> bool:
        return (
            self.known and self.durable == len(self.record.tokens) and (self.finish_written or not self.record.finished)
        )


class WriteBehind:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._dirty: dict[str, Entry] = {}
        self._news = asyncio.Event()

    @property
    def unwritten(self) -> int:
        """Sessions with news that Redis does not have yet."""
        return len(self._dirty)

    def changed(self, entry: Entry) -> None:
        self._dirty[entry.record.session_id] = entry
        self._news.set()

    async def opened(self, entry: Entry) -> None:
        """Redis has the request, or does not take it just now: whoever hears of a session may ask for it again."""
        if entry.known:
            return
        # One slow answer makes it seem away for a moment, in which it may well take a session.
        seconds = OPEN_S if self._store.up else OPEN_AWAY_S
        entry.opening = True
        try:
            async with asyncio.timeout(seconds):
                await self._write(entry)
        except (StoreDown, TimeoutError) as error:
            told = str(error) or f"no answer within {seconds:g} s"
            log.warning("a session begins that redis does not know", session_id=entry.record.session_id, error=told)
        finally:
            entry.opening = False

    async def run(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(BATCH_S)
            self._news.clear()
            await self._write_batch()
            if self._dirty and not self._store.up:
                await asyncio.sleep(RETRY_S)

    async def flush(self, seconds: float) -> bool:
        """Wait until Redis has everything; whether it has."""
        try:
            async with asyncio.timeout(seconds):
                while self._dirty:
                    await self._write_batch()
                    if self._dirty:
                        await asyncio.sleep(BATCH_S)
        except TimeoutError:
            return False
        return True

    async def _write_batch(self) -> None:
        batch = list(self._dirty.values())
        self._dirty.clear()
        await asyncio.gather(*(self._bring_up_to_date(entry) for entry in batch))

    async def _bring_up_to_date(self, entry: Entry) -> None:
        if entry.opening:
            self.changed(entry)  # looked at again: that write may fail
            return
        if entry.current:
            return
        try:
            fenced = not await self._write(entry)
        except StoreDown:
            fenced = False
        if not fenced and not entry.current:
            self.changed(entry)

    async def _write(self, entry: Entry) -> bool:
        """One write; False: the session is somebody else's now."""
        record = entry.record
        start, end, finished = entry.durable, len(record.tokens), record.finished
        answer = await self._store.write(record, start, end, whole=not entry.known)
        if answer == "FENCED":
            entry.on_fenced()
            return False
        if answer == "OK":
            entry.known, entry.durable = True, end
            entry.finish_written = finished
        else:
            log.info(
                "redis lost a session, writing it again",
                session_id=record.session_id,
                request_id=entry.request_id,
                answer=answer,
            )
            entry.known, entry.durable = False, 0
        return True
