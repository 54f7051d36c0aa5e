"""Drafter chooser: which workers may be attached to a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from coordinator.workers.worker_connection import WorkerConnection
from coordinator.workers.worker_pool import POLL_S, WorkerPool
from outrider.protocol.errors import InvalidRequest, OutriderError, ProtocolViolation
from outrider.protocol.fleet import Role

DRAFTER_WAIT_S = 3600.0
POLL_FURTHER_S = 1.0  # for a second drafter; a new one that joins the pool is noticed at once


class DrafterChooser:
    """Choice of drafters for one session: its kind, one per model, and none that sent invalid guesses."""

    def __init__(self, worker_pool: WorkerPool, kind: str) -> None:
        self._worker_pool = worker_pool
        self._kind = kind
        self._models: set[str] = set()  # fingerprints of drafters that are attached or being attached
        self._excluded: set[str] = set()  # drafters that sent this session invalid guesses

    async def wait_for(self, place: int) -> WorkerConnection | None:
        """Return a drafter for this place, or None after a long wait."""
        poll_s = POLL_FURTHER_S if place else POLL_S
        return await self._worker_pool.wait_for(
            DRAFTER_WAIT_S, lambda: self._worker_pool.choose(Role.DRAFTER, self._fits), poll_s=poll_s
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

    def exclude(self, worker_id: str) -> None:
        self._excluded.add(worker_id)

    def record_loss(self, connection: WorkerConnection, error: OutriderError) -> None:
        """Record the loss of a drafter, and exclude it if it broke the protocol."""
        if isinstance(error, InvalidRequest | ProtocolViolation):
            self.exclude(connection.info.worker_id)
        if isinstance(error, ProtocolViolation):
            self._worker_pool.shunned.report(connection.info, error.message)
        connection.record_failure()

    def could_use_hidden_states(self, places: int) -> bool:
        """Return whether a drafter that uses hidden states may be attached to one of the places."""
        if len(self._models) >= places:
            return False
        return self._worker_pool.choose(Role.DRAFTER, self._uses_hidden_states) is not None

    def _fits(self, connection: WorkerConnection) -> bool:
        """Return whether a drafter may be attached: never two of one model, and a further one only below capacity."""
        return (
            self._kind in ("", connection.info.kind)
            and connection.info.worker_id not in self._excluded
            and connection.info.model.fingerprint not in self._models
            and (not self._models or connection.occupancy() < 1.0)
        )

    def _uses_hidden_states(self, connection: WorkerConnection) -> bool:
        return connection.info.hidden_states and self._fits(connection)
