"""Choosers: which workers may serve one session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from coordinator.persistence.session_record import SessionRecord
from coordinator.placement.choice import has_room, least_loaded, occupancy, with_prefix
from coordinator.placement.sent_prefixes import PromptPrefix
from coordinator.workers.targets.fit import fits
from coordinator.workers.worker_connection import WorkerConnection
from coordinator.workers.worker_pool import POLL_S, WorkerPool
from outrider.protocol.errors import (
    Expired,
    Fenced,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PeerLost,
    ProtocolViolation,
    Unavailable,
)
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.hidden_states.messages import FINAL_STATES, StateSpec

Accepts = Callable[[WorkerInfo], bool]  # whether a session may use a drafter

DRAFTER_WAIT_S = 3600.0
POLL_FURTHER_S = 1.0  # for a second drafter; a new one that joins the pool is noticed at once


class NoVerifier(Unavailable):
    """Error for a session that found no verifier in time; a further attempt would not help."""


@dataclass(eq=False)
class VerifierChooser:
    """Choice of verifiers for one session: those of its target, none that rejected it or sent invalid replies."""

    worker_pool: WorkerPool
    wait_s: float  # for a verifier
    target: str  # the identity of the session's
    prompt: PromptPrefix
    ends: tuple[int, ...]  # the end tokens of the session's target
    _excluded: set[str] = field(default_factory=set)

    async def wait_for(self, prefer: str) -> WorkerConnection:
        """Return a verifier, if possible the one with the id `prefer`: its prefix cache may still match the prompt."""
        connection = await self.worker_pool.wait_for(self.wait_s, lambda: self.available(prefer), Role.VERIFIER)
        if connection is None:
            excluded = f"; this session has excluded {len(self._excluded)}" if self._excluded else ""
            raise NoVerifier(f"no verifier has been available for {self.wait_s:g} s{excluded}", retry_after_ms=5000)
        connection.prefixes.record(self.prompt, connection.info.load.kv_tokens_total)
        return connection

    def available(self, prefer: str = "") -> WorkerConnection | None:
        """Return an available verifier that is not excluded."""
        return self.worker_pool.choose(Role.VERIFIER, self._fits, prefer, partial(with_prefix, self.prompt))

    def move(self, record: SessionRecord) -> bool:
        """Choose a verifier where the session would run at once, and count it there until that one's next report."""
        if (other := self.available()) is None or not has_room(other, self.prompt):
            return False
        load, record.verifier = other.info.load, other.info.worker_id
        sessions, used = max(other.sessions, load.sessions) + 1, load.kv_tokens_used + self.prompt.num_tokens
        other.info = replace(other.info, load=replace(load, sessions=sessions, kv_tokens_used=used))
        return True

    def record_failure(self, connection: WorkerConnection, error: OutriderError, last: str = "") -> OutriderError:
        """Record a verifier's failure and return what it means for a session that verifier `last` had accepted."""
        if isinstance(error, ProtocolViolation):
            self._excluded.add(connection.info.worker_id)
            self.worker_pool.shunned.report(connection.info, error.message)
        elif isinstance(error, PeerLost | Unavailable | Expired):
            connection.record_failure()
        elif not isinstance(error, Fenced):
            self._excluded.add(connection.info.worker_id)
            had_another = last not in {"", *self._excluded}  # which may be restarting
            if had_another or self.available() is not None:  # another verifier may accept the session
                return PeerLost(f"{connection.info.address} rejected the session: {error.message}")
        return error

    def _fits(self, connection: WorkerConnection) -> bool:
        """Return whether a verifier may continue the session: after the last of its target, others may have come."""
        model = connection.info.model
        same = self.worker_pool.compatibility.identity(model) == self.target and model.eos_token_ids == self.ends
        return same and connection.info.worker_id not in self._excluded


class DrafterChooser:
    """Choice of drafters for one session: its kind, one per model, and none that sent invalid guesses."""

    def __init__(self, worker_pool: WorkerPool, target: ModelInfo, kind: str, accepts: Accepts) -> None:
        self._worker_pool = worker_pool
        self._target = target
        self._kind = kind
        self._accepts = accepts
        self.verifier = ""  # id of the session's; empty: an attached engine, of whose words no other session learns
        self._models: set[str] = set()  # fingerprints of drafters that are attached or being attached
        self.excluded: set[str] = set()  # drafters that sent this session invalid guesses

    async def wait_for(self, place: int, address: str = "") -> WorkerConnection | None:
        """Return a drafter for this place, if possible one at the verifier's address; None after a long wait."""
        pool, poll_s = self._worker_pool, POLL_FURTHER_S if place else POLL_S

        def pick(usable: Sequence[WorkerConnection]) -> WorkerConnection:
            return least_loaded([each for each in usable if each.info.address == address] or usable)

        return await pool.wait_for(
            DRAFTER_WAIT_S, lambda: pool.choose(Role.DRAFTER, self._fits, pick=pick), Role.DRAFTER, poll_s=poll_s
        )

    @contextlib.contextmanager
    def in_use(self, connection: WorkerConnection) -> Iterator[None]:
        """Reserve the drafter's model for the session."""
        model = connection.info.model.fingerprint
        self._models.add(model)
        try:
            yield
        finally:
            self._models.discard(model)

    def suits(self, drafter: WorkerInfo) -> bool:
        """Return whether a drafter is of the session's kind and for its target."""
        return self._kind in ("", drafter.kind) and fits(drafter.model, self._target) and self._accepts(drafter)

    def exclude(self, drafter: WorkerInfo, reason: str) -> None:
        """Use a drafter no longer whose guesses the verifier refuses."""
        self.excluded.add(drafter.worker_id)
        if self.verifier:
            self._worker_pool.shunned.report(drafter, reason, self.verifier)

    def record_loss(self, connection: WorkerConnection, error: OutriderError) -> None:
        """Record the loss of a drafter, and exclude it if it broke the protocol or refuses this session."""
        if isinstance(error, InvalidRequest | ProtocolViolation):
            self.excluded.add(connection.info.worker_id)
        if isinstance(error, ProtocolViolation):
            self._worker_pool.shunned.report(connection.info, error.message)
        if isinstance(error, Overloaded):
            connection.record_full()
        elif not isinstance(error, InvalidRequest):
            connection.record_failure()

    def readable_states(self, places: int) -> list[StateSpec]:
        """Return the hidden states that drafters read which may be attached to one of the places."""
        if len(self._models) >= places:
            return []
        pool = self._worker_pool
        fitting = [each for each in pool.workers.of(Role.DRAFTER) if pool.usable(each) and self._fits(each)]
        return [each.info.state_spec or FINAL_STATES for each in fitting if each.info.hidden_states]

    def _fits(self, connection: WorkerConnection) -> bool:
        """Return whether a drafter may be attached: below its capacity, and never two of one model."""
        info = connection.info
        taken = info.worker_id in self.excluded or info.model.fingerprint in self._models
        taken |= bool(self.verifier) and self._worker_pool.shunned.is_shunned(info, self.verifier)
        return not taken and self.suits(info) and occupancy(connection) < 1.0
