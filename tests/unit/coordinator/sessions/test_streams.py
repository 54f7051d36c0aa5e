"""Streams to workers that leave."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from coordinator.sessions.streams import WorkerStream
from coordinator.workers import worker_connection
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_connection import Stream, WorkerConnection
from outrider.observability.tracing import Span
from outrider.protocol.errors import PeerLost
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.v1 import drafter_pb2 as draft


async def test_a_worker_that_left_after_it_was_chosen_is_lost_like_any_other() -> None:
    """Its channel is closed, which gRPC reports by an error of its own."""
    info = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    connection = WorkerConnection(info, lambda: FleetKeys().access(Role.DRAFTER))
    await connection.close()
    stream: WorkerStream[draft.DraftRequest, draft.DraftReply] = WorkerStream(
        connection, draft.DraftRequest(), draft.DraftReply.FromString, Span()
    )
    with pytest.raises(PeerLost, match="has left"):
        async with stream:
            pass
    assert not connection.streams


async def test_a_worker_may_fail_for_days() -> None:
    """Its backoff doubles no further: past a thousand failures a float could not hold it."""
    connection = WorkerConnection(
        WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f")), lambda: FleetKeys().access(Role.DRAFTER)
    )
    for _ in range(3000):  # of probes, once a second
        connection.record_failure()
    assert not connection.usable()
    connection.record_success()
    await connection.close()


async def test_a_verifier_without_sessions_forgets_how_long_its_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """What made them slow may have ended: against such steps every loss of the next answer would be a gain."""
    monkeypatch.setattr(worker_connection, "PROBE_S", 0.02)
    monkeypatch.setattr(worker_connection, "PROBE_BUSY_S", 0.02)
    monkeypatch.setattr(worker_connection, "PROBE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(worker_connection, "FORGETS_S", 0.1)
    connection = WorkerConnection(
        WorkerInfo("v", Role.VERIFIER, "127.0.0.1:1", ModelInfo("m", "f")), lambda: FleetKeys().access(Role.VERIFIER)
    )
    connection.plain_steps.append((4.0, 0.1))
    connection.streams.add(cast(Stream, object()))
    await asyncio.sleep(0.5)
    assert connection.plain_steps, "in use"
    connection.streams.clear()
    async with asyncio.timeout(10):
        while connection.plain_steps:
            await asyncio.sleep(0.01)
    await connection.close()
