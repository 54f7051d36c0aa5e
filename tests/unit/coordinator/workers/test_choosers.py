"""Which workers a session may have."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest

from coordinator.api.gauges import _workers
from coordinator.control.throughput_model import Mode
from coordinator.placement.sent_prefixes import PromptPrefix
from coordinator.workers.choosers import DrafterChooser, VerifierChooser
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.target import Target
from coordinator.workers.targets import known_targets
from coordinator.workers.worker_connection import SILENT_S
from coordinator.workers.worker_pool import POLL_S, WorkerPool
from outrider.observability.metrics import CoordinatorMetrics
from outrider.protocol.errors import InvalidRequest, OutriderError, Overloaded, PeerLost, ProtocolViolation
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import byte_tokenizer

BEFORE = ModelInfo("target", "before", weights_digest="w")
NOW = ModelInfo("target", "now", weights_digest="w")


def chooser_of(pool: WorkerPool, target: ModelInfo) -> VerifierChooser:
    """Return the choice of a session of this target."""
    return VerifierChooser(pool, 0.0, pool.compatibility.identity(target), PromptPrefix(()), target.eos_token_ids)


async def test_a_session_does_not_move_to_another_target() -> None:
    """The last verifier of its target has left, and one of another has come: it is no violation of that one's."""
    pool = WorkerPool(FleetKeys(), CoordinatorSettings())
    await pool.workers.put(WorkerInfo("new", Role.VERIFIER, "127.0.0.1:1", NOW))
    session = chooser_of(pool, BEFORE)
    assert session.available() is None
    assert chooser_of(pool, NOW).available() is not None
    same = await pool.workers.put(WorkerInfo("old", Role.VERIFIER, "127.0.0.1:2", BEFORE))
    assert session.available() is same
    mended = replace(BEFORE, eos_token_ids=(2, 7))
    await pool.workers.put(WorkerInfo("mended", Role.VERIFIER, "127.0.0.1:3", mended))
    assert chooser_of(pool, replace(BEFORE, eos_token_ids=(2,))).available() is None
    assert chooser_of(pool, mended).available() is not None
    assert not pool.has_spare(same), "its sessions would wait for one that cannot take them"
    await pool.workers.close()


async def test_mixed_verifiers_have_their_weights_in_common() -> None:
    pool = WorkerPool(FleetKeys(), CoordinatorSettings(mixed_verifiers=True))
    known = await pool.workers.put(WorkerInfo("new", Role.VERIFIER, "127.0.0.1:1", NOW))
    assert chooser_of(pool, BEFORE).available() is known
    await pool.workers.close()


async def test_a_session_prefers_the_drafter_in_its_verifiers_process() -> None:
    pool = WorkerPool(FleetKeys(), CoordinatorSettings())
    made = ModelInfo("drafter", "d")
    others = [await pool.workers.put(WorkerInfo(f"d{i}", Role.DRAFTER, f"127.0.0.1:{i}", made)) for i in (1, 2, 3)]
    for own in others:
        session = DrafterChooser(pool, NOW, "", lambda _: True)
        assert await session.wait_for(0, own.info.address) is own
    assert await DrafterChooser(pool, NOW, "", lambda _: True).wait_for(0, "127.0.0.1:9") in others
    await pool.workers.close()


async def test_sessions_wait_for_a_first_drafter_without_asking_again() -> None:
    """A drafter that is known is asked for again and again: its backoff ends without an event."""
    pool, asked = WorkerPool(FleetKeys(), CoordinatorSettings()), []

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
    pool = WorkerPool(FleetKeys(), CoordinatorSettings())
    drafter = await pool.workers.put(WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("drafter", "d")))
    session = DrafterChooser(pool, NOW, "", lambda _: True)
    session.record_loss(drafter, error)
    assert drafter._failures == failures
    assert drafter.usable() is isinstance(error, InvalidRequest)
    assert session._fits(drafter) is serves_this
    assert DrafterChooser(pool, NOW, "", lambda _: True)._fits(drafter)
    await pool.workers.close()


async def test_a_full_drafter_is_not_asked() -> None:
    pool = WorkerPool(FleetKeys(), CoordinatorSettings())
    busy = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("drafter", "d"), capacity=2, load=WorkerLoad(2))
    drafter = await pool.workers.put(busy)
    assert not DrafterChooser(pool, NOW, "", lambda _: True)._fits(drafter)
    drafter.info = replace(busy, load=WorkerLoad(1))
    assert DrafterChooser(pool, NOW, "", lambda _: True)._fits(drafter)
    await pool.workers.close()


async def test_a_verifier_that_failed_rests_and_a_silent_one_is_the_last_choice() -> None:
    """Otherwise a session meets it again at once, until it has lost as many verifiers as it may."""
    pool = WorkerPool(FleetKeys(), CoordinatorSettings())
    one, other = [await pool.workers.put(WorkerInfo(w, Role.VERIFIER, f"127.0.0.1:{w}", NOW)) for w in "12"]
    session = chooser_of(pool, NOW)
    one.silent_s = SILENT_S
    assert session.available("1") is other
    other.silent_s = SILENT_S
    assert session.available("1") is one
    session.record_failure(one, PeerLost("gone"))
    assert session.available("1") is other
    session.record_failure(other, PeerLost("gone"))
    assert session.available("1") is None
    await pool.workers.close()


async def test_a_session_waits_for_its_verifier_only_if_that_one_has_not_refused_it() -> None:
    """Else an error of the session's own was told after a long wait, as one that may be tried again."""
    pool = WorkerPool(FleetKeys(), CoordinatorSettings())
    one, other = [await pool.workers.put(WorkerInfo(w, Role.VERIFIER, f"127.0.0.1:{w}", NOW)) for w in "12"]
    session, refusal, failure = chooser_of(pool, NOW), InvalidRequest("too small"), OutriderError("internal error")
    assert isinstance(session.record_failure(one, failure, "1"), PeerLost), "the other one may take it"
    assert session.record_failure(other, refusal, "1") is refusal
    assert isinstance(chooser_of(pool, NOW).record_failure(other, refusal, "0"), PeerLost), "it may be restarting"
    alone = chooser_of(pool, NOW)
    assert isinstance(alone.record_failure(one, refusal), PeerLost)
    assert alone.record_failure(other, refusal) is refusal
    await pool.workers.close()


async def test_a_model_is_free_again_when_its_drafter_has_left_the_session() -> None:
    pool = WorkerPool(FleetKeys(), CoordinatorSettings())
    drafter = await pool.workers.put(WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("drafter", "d")))
    session = DrafterChooser(pool, NOW, "", lambda _: True)
    with session.in_use(drafter):
        assert not session._fits(drafter)
    assert session._fits(drafter)
    await pool.workers.close()


async def test_a_verifier_that_does_not_answer_is_not_shown_as_usable() -> None:
    """It may hang for good with its connections open: no alert told that there was no other."""
    metrics, pool = CoordinatorMetrics(Mode), WorkerPool(FleetKeys(), CoordinatorSettings())
    metrics.workers.source = lambda: _workers(pool)
    verifier = await pool.workers.put(WorkerInfo("v", Role.VERIFIER, "127.0.0.1:1", NOW))

    def shown(state: str) -> float | None:
        return metrics.registry.get_sample_value("outrider_workers", {"role": "verifier", "state": state})

    assert (shown("usable"), shown("resting")) == (1, 0)
    verifier.silent_s = SILENT_S
    assert (shown("usable"), shown("resting")) == (0, 1)
    await pool.workers.close()


async def test_a_target_too_many_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_targets, "MAX_TARGETS", 1)
    pool, nothing = WorkerPool(FleetKeys(), CoordinatorSettings()), cast(Any, None)
    pool.targets.add(Target(BEFORE, byte_tokenizer(), nothing, nothing, identity=BEFORE.text_id), pool.verifiers)
    await pool.workers.put(WorkerInfo("old", Role.VERIFIER, "127.0.0.1:1", BEFORE))
    with pytest.raises(Overloaded, match="1 targets"):
        pool.compatibility.check(WorkerInfo("new", Role.VERIFIER, "127.0.0.1:2", replace(NOW, name="another")))
    await pool.workers.close()
