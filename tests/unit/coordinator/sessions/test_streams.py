"""Streams to workers that leave."""

from __future__ import annotations

import pytest

from coordinator.sessions.streams import WorkerStream
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_connection import WorkerConnection
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
    for _ in range(3000):
        connection.record_failure()
    assert not connection.usable()
    connection.record_success()
    await connection.close()
