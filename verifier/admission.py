"""Admission of sessions: epochs, the waiting queue, and reservation of KV cache."""

from __future__ import annotations

import time
from collections import OrderedDict, deque

from outrider.observability.metrics import VerifierMetrics
from outrider.protocol.errors import Fenced, InvalidRequest, OutriderError, Overloaded, PeerLost
from outrider.settings.verifier import VerifierSettings
from outrider.speculation.grammar import GrammarMatcher
from verifier.session import VerifyOpening, VerifySession
from verifier.target import VerifyTarget

_REMEMBERED_EPOCHS = 16_384
EPOCH_KEPT_S = 600.0  # after its last stream; longer than a coordinator takes to notice that it lost a session
_RETRY_AFTER_MS = 1_000


class Admission:
    """Running and waiting sessions. A running session has reserved all KV cache that it can come to need."""

    def __init__(self, target: VerifyTarget, limits: VerifierSettings, metrics: VerifierMetrics) -> None:
        self._target = target
        self._limits = limits
        self._metrics = metrics
        self._epochs = _EpochMemory()
        self.waiting: deque[VerifySession] = deque()
        self._closed: list[VerifySession] = []
        self.running: dict[str, VerifySession] = {}
        self.reserved_tokens = 0
        metrics.bind_gauge(metrics.sessions, lambda: len(self.running))
        metrics.bind_gauge(metrics.waiting, lambda: len(self.waiting))
        metrics.bind_gauge(metrics.cache_usage, lambda: self.reserved_tokens / limits.kv_tokens)

    def sessions(self) -> list[VerifySession]:
        """Return the running and waiting sessions."""
        return [*self.running.values(), *self.waiting]

    def find(self, session_id: str) -> VerifySession | None:
        return next((session for session in self.sessions() if session.id == session_id), None)

    def open(self, opening: VerifyOpening, guide: GrammarMatcher | None = None) -> VerifySession:
        """Admit a session or queue it; raise if its epoch is old, it can never fit, or the queue is full."""
        current = self.find(opening.session_id)
        known = self._epochs.latest(opening.session_id) if current is None else current.epoch
        if opening.epoch < known:
            message = f"session {opening.session_id} is at epoch {known}"
            raise Fenced(message, field="open.epoch", value=opening.epoch, limit=f"at least {known}")
        session = VerifySession(opening, self._target.info, self._target.device, guide)
        self._check_size(session)
        if current is not None:
            lost = PeerLost if opening.epoch == known else Fenced  # an owner's older stream may come late
            self.close(current, lost(f"session {current.id} was taken over by epoch {opening.epoch}"))
        self._epochs.record(opening.session_id, opening.epoch)
        self.waiting.append(session)
        self.admit_waiting()
        if len(self.waiting) > self._limits.max_waiting:
            self.waiting.pop()
            message = f"{len(self.running)} sessions run and {len(self.waiting)} wait"
            held, limit = len(self.running) + len(self.waiting), self._limits.max_sessions + self._limits.max_waiting
            raise Overloaded(message, field="sessions", value=held, limit=limit, retry_after_ms=_RETRY_AFTER_MS)
        return session

    def close(self, session: VerifySession, error: OutriderError | None = None) -> None:
        """End a session; idempotent."""
        if session.closed:
            return
        session.end(error)
        self._epochs.record(session.id, session.epoch)
        if self.running.get(session.id) is session:
            del self.running[session.id]
            self.reserved_tokens -= self._tokens_to_reserve(session)
            self._closed.append(session)
        else:
            self.waiting.remove(session)

    def admit_waiting(self) -> None:
        """Move sessions from the queue to the running ones while they fit, in order."""
        while self.waiting and len(self.running) < self._limits.max_sessions:
            session = self.waiting[0]
            needed = self._tokens_to_reserve(session)
            if self.reserved_tokens + needed > self._limits.kv_tokens:
                break
            self.waiting.popleft()
            self._metrics.queued.observe(time.monotonic() - session.opened_at)
            self.running[session.id] = session
            self.reserved_tokens += needed

    def free_closed(self) -> None:
        """Free the KV cache of closed sessions. Not during a step: the target may be computing them."""
        for session in self._closed:
            self._target.free(session)
        self._closed.clear()

    def _check_size(self, session: VerifySession) -> None:
        most = self._limits.kv_tokens
        if self._tokens_to_reserve(session) > most:
            left = max(0, most - session.prompt_length - self._limits.guess_rows)
            limit = f"at most {left}: this verifier's cache holds {most} tokens"
            raise InvalidRequest.of("params.max_tokens", session.params.max_tokens, limit)

    def _tokens_to_reserve(self, session: VerifySession) -> int:
        """Return the KV cache, in whole blocks, that a session can come to need: no step finds the cache full."""
        tokens = session.prompt_length + session.params.max_tokens + self._limits.guess_rows
        return -(-tokens // self._target.block_tokens) * self._target.block_tokens


class _EpochMemory:
    """Highest epochs of recent sessions. They expire: a forged high epoch must not block an id for ever."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def latest(self, session_id: str) -> int:
        """Return the latest epoch of a session; −1 if it is unknown or has expired."""
        epoch, used_at = self._epochs.get(session_id, (-1, 0.0))
        return epoch if time.monotonic() - used_at < EPOCH_KEPT_S else -1

    def record(self, session_id: str, epoch: int) -> None:
        self._epochs[session_id] = epoch, time.monotonic()
        self._epochs.move_to_end(session_id)
        while len(self._epochs) > _REMEMBERED_EPOCHS:
            self._epochs.popitem(last=False)
