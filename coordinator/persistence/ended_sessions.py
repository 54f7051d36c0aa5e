"""Ended sessions: records of sessions that do not run here, in Redis and, for a time without it, in memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from coordinator.persistence.redis_connection import StoreDown
from coordinator.persistence.session_record import SessionRecord
from coordinator.persistence.store import Store
from coordinator.persistence.stored_records import Unreadable
from outrider.protocol.errors import NotFound
from outrider.security.tenants import tenant

_REMEMBERED = 2_000_000  # tokens, about 80 MB


class EndedSessions:
    """Records of the calling tenant's sessions: those that ended here recently, and those of all coordinators."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.recent: OrderedDict[str, SessionRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}  # when they were kept: a record that is resumed grows

    def keep(self, record: SessionRecord) -> None:
        """Remember a session that has ended here, unless it was resumed since: a reader of its output may be late."""
        if record.session_id in self.recent and self.recent[record.session_id].epoch > record.epoch:
            return
        self.recent[record.session_id] = record
        self.recent.move_to_end(record.session_id)
        # As tokens: log probabilities take many times the memory, and a parameter's text a quarter a character.
        size = 500 + len(record.request.prompt) + len(record.tokens) + 40 * len(record.logprobs)
        self._sizes[record.session_id] = size + len(repr(record.request.params)) // 4
        while sum(self._sizes.values()) > _REMEMBERED:
            del self._sizes[self.recent.popitem(last=False)[0]]

    async def load(self, session_id: str) -> tuple[SessionRecord, bool]:
        """Claim a session; return its record, and whether it is stored as finished."""
        recent = self._remembered(session_id)
        try:
            stored = await self._store.claim(session_id, tenant().id)
        except (StoreDown, Unreadable):
            if recent is None:
                raise
            unanswered = replace(recent, epoch=recent.epoch if recent.guessed else recent.epoch + 1, guessed=True)
            self.keep(unanswered)
            return unanswered, False
        if (found := stored or recent) is None:
            raise _unknown(session_id)
        stored_as_finished = stored is not None and stored.finished
        if recent is None:
            return found, stored_as_finished
        # A claim counts an unfinished session's epoch on by one; beyond that another coordinator may have owned it.
        own_epoch = recent.epoch - 1 if recent.guessed else recent.epoch
        if found.epoch > (own_epoch if found.finished else own_epoch + 1):
            return found, stored_as_finished
        most = max(found, recent, key=lambda each: (len(each.tokens), each.finished))
        claims_lost = not found.finished and found.epoch <= own_epoch  # by Redis, perhaps another coordinator's
        record = replace(most, epoch=max(recent.epoch + 2 * claims_lost, found.epoch), guessed=False)
        self.keep(record)
        return record, stored_as_finished

    async def cancel(self, session_id: str) -> bool:
        """Cancel a session; return False if it had ended already."""
        if (recent := self._remembered(session_id)) is not None and recent.finished:
            return False
        if (cancelled := await self._store.cancel(session_id, tenant().id)) is None:
            raise _unknown(session_id)
        return cancelled

    def _remembered(self, session_id: str) -> SessionRecord | None:
        record = self.recent.get(session_id)
        return record if record is not None and record.tenant == tenant().id else None


def _unknown(session_id: str) -> NotFound:
    message, limit = f"there is no session {session_id!r}", "a session id from Started"
    return NotFound(message, field="session_id", value=session_id, limit=limit)
