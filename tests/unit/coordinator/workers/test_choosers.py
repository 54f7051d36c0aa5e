"""Which workers a session may have."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import patch

import pytest

from coordinator.workers.choosers import DrafterChooser, VerifierChooser
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_pool import POLL_S, WorkerPool
from outrider.protocol.errors import InvalidRequest, OutriderError, Overloaded, PeerLost, ProtocolViolation
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad

BEFORE = ModelInfo("target", "before", weights_digest="w")
NOW = ModelInfo("target", "now", weights_digest="w")


async def test_a_session_does_not_move_to_another_target() -> None:
    """The last verifier of its target has left, and one of another has come: it is no violation of that one's."""
    pool = WorkerPool(FleetKeys(), 10.0)
    await pool.workers.put(WorkerInfo("new", Role.VERIFIER, "127.0.0.1:1", NOW))
    session = VerifierChooser(pool, 0.0, BEFORE.text_id)
    assert session.available() is None
    assert VerifierChooser(pool, 0.0, NOW.text_id).available() is not None
    same = await pool.workers.put(WorkerInfo("old", Role.VERIFIER, "127.0.0.1:2", BEFORE))
    assert session.available() is same
    await pool.workers.close()


async def test_mixed_verifiers_have_their_weights_in_common() -> None:
    pool = WorkerPool(FleetKeys(), 10.0, mixed=True)
    known = await pool.workers.put(WorkerInfo("new", Role.VERIFIER, "127.0.0.1:1", NOW))
    assert VerifierChooser(pool, 0.0, "w").available() is known
    await pool.workers.close()


async def test_a_session_prefers_the_drafter_in_its_verifiers_process() -> None:
    pool = WorkerPool(FleetKeys(), 10.0)
    made = ModelInfo("drafter", "d")
    others = [await pool.workers.put(WorkerInfo(f"d{i}", Role.DRAFTER, f"127.0.0.1:{i}", made)) for i in (1, 2, 3)]
    for own in others:
        session = DrafterChooser(pool, NOW, "", lambda _: True)
        assert await session.wait_for(0, own.info.address) is own
    assert await DrafterChooser(pool, NOW, "", lambda _: True).wait_for(0, "127.0.0.1:9") in others
    await pool.workers.close()


async def test_sessions_wait_for_a_first_drafter_without_asking_again() -> None:
    """A drafter that is known is asked for again and again: its backoff ends without an event."""
    pool, asked = WorkerPool(FleetKeys(), 10.0), []

    def asks(drafter: WorkerInfo) -> bool:
        asked.append(drafter.worker_id)
        return drafter.worker_id == "right"

    waiting = asyncio.create_task(DrafterChooser(pool, NOW, "", asks).wait_for(0))
    await asyncio.sleep(2 * POLL_S)
    with patch.object(pool, "choose", wraps=pool.choose) as choose:
        await asyncio.sleep(3 * POLL_S)
        assert not choose.called
        await pool.workers.put(WorkerInfo("wrong", Role.DRAFTER, "127.0.0.1:1", ModelInfo("drafter", "d")))
        await asyncio.sleep(3 * POLL_S)
        assert choose.call_count >= 2
    right = await pool.workers.put(WorkerInfo("right", Role.DRAFTER, "127.0.0.1:2", ModelInfo("drafter", "e")))
    assert await asyncio.wait_for(waiting, 5) is right
    assert "wrong" in asked
    await pool.workers.close()


@pytest.mark.parametrize(
    ("error", "serves_this", "failures"),
    [
        (InvalidRequest("the session is of another width"), False, 0),
        (Overloaded("full"), True, 0),
        (PeerLost("gone"), True, 1),
        (ProtocolViolation("nonsense"), False, 1),
    ],
)
async def test_what_a_drafters_loss_means_for_others(error: OutriderError, serves_this: bool, failures: int) -> None:
    """A session that a drafter refuses is that session's fault, and a full one has not failed."""
    pool = WorkerPool(FleetKeys(), 10.0)
    drafter = await pool.workers.put(WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("drafter", "d")))
    session = DrafterChooser(pool, NOW, "", lambda _: True)
    session.record_loss(drafter, error)
    assert drafter._failures == failures
    assert drafter.usable() is isinstance(error, InvalidRequest)
    assert session._fits(drafter) is serves_this
    assert DrafterChooser(pool, NOW, "", lambda _: True)._fits(drafter)
    await pool.workers.close()


async def test_a_full_drafter_is_not_asked() -> None:
    pool = WorkerPool(FleetKeys(), 10.0)
    busy = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("drafter", "d"), capacity=2, load=WorkerLoad(2))
    drafter = await pool.workers.put(busy)
    assert not DrafterChooser(pool, NOW, "", lambda _: True)._fits(drafter)
    drafter.info = replace(busy, load=WorkerLoad(1))
    assert DrafterChooser(pool, NOW, "", lambda _: True)._fits(drafter)
    await pool.workers.close()
