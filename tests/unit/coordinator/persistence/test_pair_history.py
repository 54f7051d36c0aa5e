"""What pairs have shown: bounded in memory, written behind, and never older than what Redis has."""

from __future__ import annotations

from typing import cast

import pytest

from coordinator.control.estimator import MAX_GAINED, PairHistory
from coordinator.persistence import pair_history
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.persistence.redis_connection import StoreDown
from coordinator.persistence.store import Store


class FakeStore:
    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], PairHistory] = {}
        self.asked: list[str] = []
        self.up = True

    async def pair(self, target: str, drafter: str) -> PairHistory | None:
        self.asked.append(drafter)
        return self.pairs.get((target, drafter))

    async def put_pair(self, target: str, drafter: str, history: PairHistory) -> None:
        if not self.up:
            raise StoreDown("away")
        self.pairs[target, drafter] = history


def shown(draft_ms: float) -> PairHistory:
    return PairHistory(acceptance=[0.5], draft_ms=draft_ms)


async def test_memory_is_bounded_however_many_models_drafters_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    monkeypatch.setattr(pair_history, "MAX_PAIRS", 4)
    pairs = PairHistoryStore(cast(Store, store))
    for number in range(100):
        name = f"drafter {number}"
        assert await pairs.recall("target", name) is None
        pairs.remember("target", name, shown(number))
    assert len(pairs._known) == 4
    assert len(pairs._unwritten) <= 4, "also while Redis takes nothing"


async def test_the_pair_that_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    monkeypatch.setattr(pair_history, "MAX_PAIRS", 2)
    pairs = PairHistoryStore(cast(Store, store))
    pairs.remember("target", "ours", shown(1.0))
    for number in range(5):
        pairs.remember("target", f"other {number}", shown(2.0))
        assert await pairs.recall("target", "ours") == shown(1.0)
    assert store.asked == [], "it was never asked for in Redis"


async def test_a_pair_that_had_to_go_is_recalled_from_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    monkeypatch.setattr(pair_history, "MAX_PAIRS", 2)
    pairs = PairHistoryStore(cast(Store, store))
    pairs.remember("target", "ours", shown(1.0))
    await pairs._write()
    for number in range(5):
        pairs.remember("target", f"other {number}", shown(2.0))
    assert await pairs.recall("target", "ours") == shown(1.0)
    assert store.asked == ["ours"]


async def test_what_redis_did_not_take_is_written_later() -> None:
    store = FakeStore()
    pairs = PairHistoryStore(cast(Store, store))
    store.up = False
    pairs.remember("target", "ours", shown(1.0))
    await pairs._write()
    assert not store.pairs
    store.up = True
    await pairs._write()
    assert store.pairs == {("target", "ours"): shown(1.0)}


async def test_a_history_is_written_once() -> None:
    """Again every two seconds, an idle coordinator would undo what others have measured since."""
    store = FakeStore()
    pairs = PairHistoryStore(cast(Store, store))
    pairs.remember("target", "ours", shown(1.0))
    await pairs._write()
    store.pairs["target", "ours"] = shown(9.0)
    await pairs._write()
    assert store.pairs["target", "ours"] == shown(9.0)


async def test_gains_and_losses_add_up_within_bounds() -> None:
    store = FakeStore()
    pairs = PairHistoryStore(cast(Store, store))
    assert pairs.settle("target", "ours", -3.0) == 0.0, "nothing is known of it yet"
    pairs.remember("target", "ours", shown(1.0))
    assert pairs.settle("target", "ours", -2.0) == -2.0
    assert pairs.settle("target", "ours", 0.5) == -1.5
    pairs.remember("target", "ours", shown(1.0))
    assert pairs.settle("target", "ours", 0.0) == -1.5
    await pairs._write()
    assert store.pairs["target", "ours"].gained == -1.5
    assert pairs.settle("target", "ours", 99.0) == MAX_GAINED
    assert pairs.settle("target", "ours", -99.0) == -MAX_GAINED


def test_a_drafting_time_that_is_not_known_changes_none() -> None:
    pairs = PairHistoryStore(cast(Store, FakeStore()))
    for shown_ms, kept_ms in ((0.0, 0.0), (5.0, 5.0), (0.0, 5.0), (10.0, 6.5)):
        pairs.remember("target", "d", shown(shown_ms))
        assert pairs._known["target", "d"] is not None
        assert pairs._known["target", "d"].draft_ms == pytest.approx(kept_ms)


async def test_a_redis_that_hangs_keeps_no_session_from_its_drafter() -> None:
    """Each question would wait for seconds, and be asked again by the next session."""
    store = FakeStore()
    store.pairs["target", "ours"] = shown(1.0)
    store.up = False
    pairs = PairHistoryStore(cast(Store, store))
    assert await pairs.recall("target", "ours") is None
    assert store.asked == []
    store.up = True
    assert await pairs.recall("target", "ours") == shown(1.0)
