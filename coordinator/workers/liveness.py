"""Liveness: cancel streams of silent workers and overdue verifiers, so that sessions continue elsewhere.

Time is counted in ticks of this process's event loop, so that a pause of this process makes no worker late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

import structlog

from coordinator.workers.worker_connection import SILENT_S, WorkerConnection
from outrider.protocol.errors import PeerLost
from outrider.protocol.fleet import Role, WorkerLoad

log = structlog.get_logger(__name__)

TICK_S = 0.25
_STEPS = 20.0  # steps of the verifier's usual duration that a verdict may take
_PROMPT_FACTOR = 20.0  # by which a prompt may take longer than its tokens alone: other prompts share its steps
_PROMPT_TOKEN_MS = 10.0  # at a verifier that publishes no cost curve
_MAX_S = 600.0


class VerdictDeadline:
    """Deadline of the next verdict on a stream. A verifier decodes without guesses too, so a verdict is always due."""

    def __init__(self, num_tokens: int) -> None:
        self.wait_timeout_s = 0.0  # the verifier's draft wait timeout
        self._prompt = num_tokens  # tokens to compute before the first verdict
        self._waited_s = self._queued_s = 0.0

    def reset(self) -> None:
        self._prompt = 0
        self._waited_s = 0.0

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        if self._prompt and load.waiting and self._queued_s < _MAX_S:
            self._queued_s += tick_s  # the verifier reports waiting sessions, and ours may be one of them
            return 0.0
        self._waited_s += tick_s
        limit_s = timeout_s + self.wait_timeout_s + _STEPS * load.step_ms / 1000
        if self._prompt:
            token_ms = load.cost.at(load.cost.rows[-1]) / load.cost.rows[-1] if load.cost.rows else _PROMPT_TOKEN_MS
            limit_s += timeout_s + _PROMPT_FACTOR * self._prompt * token_ms / 1000
        return self._waited_s if self._waited_s > min(_MAX_S, limit_s) else 0.0


async def watch(
    connections: Callable[[], Iterable[WorkerConnection]], spare: Callable[[WorkerConnection], bool], timeout_s: float
) -> None:
    """Cancel streams of silent or overdue workers until cancelled.

    `spare` returns whether another worker could take a worker's sessions. Without one, a silent verifier gets the
    longer `timeout_s`.
    """
    while True:
        await asyncio.sleep(TICK_S)
        for connection in list(connections()):
            _check(connection, spare, timeout_s)


def _check(connection: WorkerConnection, spare: Callable[[WorkerConnection], bool], timeout_s: float) -> None:
    connection.silent_s += TICK_S
    connection.watched_s += TICK_S
    address, silent_s = connection.info.address, connection.silent_s
    if 5 * SILENT_S <= silent_s < 5 * SILENT_S + TICK_S and not connection.round_trip_ms:
        log.warning("worker cannot be reached", worker=connection.info.worker_id, address=address)
    lost = connection.is_silent and (connection.info.role is Role.DRAFTER or silent_s >= timeout_s or spare(connection))
    if lost and connection.streams:
        log.info("worker silent", worker=connection.info.worker_id, seconds=silent_s, sessions=connection.sessions)
        connection.record_failure()
    load = replace(connection.info.load, waiting=0) if connection.is_stuck else connection.info.load
    for stream in list(connection.streams):
        if lost:
            stream.cancel(PeerLost(f"no message from {address} for {silent_s:g} s"))
        elif overdue_s := stream.overdue_s(TICK_S, load, timeout_s):
            connection.is_stuck = True
            stream.cancel(PeerLost(f"verdict of {address} overdue for {overdue_s:g} s"))
