"""The write_behind over a store that takes its time: nobody waits for sessions that grow without end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from coordinator.persistence.redis_connection import MAX_CONNECTIONS, StoreDown
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.persistence.store import Store
from coordinator.persistence.write_behind import (
    BATCH_S,
    FIRST_WRITE_S,
    MAX_BATCH_S,
    RETRY_S,
    SESSIONS_PER_S,
    Entry,
    WriteBehind,
)
from outrider.base.aio import until
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason
from outrider.protocol.speculation import TokenKind as Kind

WRITE_S = 0.005


class SlowStore:
    """Takes every write after a while, and what was told how far is held here."""

    def __init__(self, write_s: float = WRITE_S) -> None:
        self.up = True  # as far as is known
        self.answers = True
        self.write_s = write_s
        self.refused: set[str] = set()  # sessions that it never takes, each after all others
        self.forgotten: set[str] = set()  # those that their coordinator no longer has
        self.known: dict[str, int] = {}
        self.writes = self.gaps = 0
        self.finished: set[str] = set()

    async def write(self, record: SessionRecord, start: int, end: int, *, whole: bool) -> str:
        self.writes += 1
        is_refused, finished = record.session_id in self.refused, record.finished
        await asyncio.sleep(self.write_s + 0.01 * is_refused)
        self.up = self.answers and not is_refused
        if not self.up:
            raise StoreDown("away")
        if not whole and record.session_id not in self.known:
            return "MISSING"
        if start > self.known.get(record.session_id, 0):
            self.gaps += 1
            return "GAP"
        self.known[record.session_id] = end
        if finished:
            self.finished.add(record.session_id)
        return "OK"


def entry_of(name: str) -> Entry:
    record = SessionRecord(name, SessionRequest((1, 2), SamplingParams(seed=1)))
    return Entry(record, lambda _: pytest.fail("nobody else claims it"))


def grow(entry: Entry) -> None:
    entry.record.tokens.append(7)
    entry.record.kinds.append(Kind.PLAIN)


def journal_over(store: SlowStore) -> WriteBehind:
    return WriteBehind(cast(Store, cast(Any, store)), lambda name: name not in store.forgotten)


async def test_a_session_that_grows_without_end_keeps_no_other_waiting() -> None:
    store = SlowStore()
    write_behind = journal_over(store)
    running = asyncio.create_task(write_behind.run())
    growing, new = entry_of("growing"), entry_of("new")

    async def grow_without_end() -> None:
        while True:
            grow(growing)
            write_behind.mark_changed(growing)
            await asyncio.sleep(WRITE_S / 5)

    others = asyncio.create_task(grow_without_end())
    await asyncio.sleep(5 * BATCH_S)
    write_behind.mark_changed(new)
    assert await until(lambda: "new" in store.known, 5)
    assert await until(lambda: store.known["growing"] > 5, 5), "and it is written itself"
    others.cancel()
    growing.record.finish_reason = FinishReason.LENGTH
    write_behind.mark_changed(growing)
    assert await write_behind.flush(10)
    assert store.finished == {"growing"}
    assert store.known["growing"] == len(growing.record.tokens)
    assert store.gaps == 0, "what was committed while a write was under way is part of the next one"
    running.cancel()


async def test_an_end_that_comes_while_a_session_is_written_is_written_too() -> None:
    write_behind = journal_over(store := SlowStore(2 * BATCH_S))
    running = asyncio.create_task(write_behind.run())
    grow(entry := entry_of("ending"))
    write_behind.mark_changed(entry)
    assert await until(lambda: store.writes == 1, 5)
    entry.record.finish_reason = FinishReason.STOP
    write_behind.mark_changed(entry)
    assert await write_behind.flush(10)
    assert store.finished == {"ending"}
    running.cancel()


async def test_what_redis_lost_is_written_again_whole() -> None:
    store = SlowStore()
    write_behind = journal_over(store)
    running = asyncio.create_task(write_behind.run())
    entry = entry_of("lost")
    await write_behind.write_first(entry)
    store.known.clear()
    grow(entry)
    write_behind.mark_changed(entry)
    assert await write_behind.flush(10)
    assert store.known == {"lost": 1}
    running.cancel()


async def test_opening_waits_for_redis_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    write_behind = journal_over(store := SlowStore())
    with monkeypatch.context() as patch:
        patch.setattr("coordinator.persistence.write_behind.FIRST_WRITE_S", 10.0)  # the machine may be busy
        await write_behind.write_first(entry_of("quick"))
    assert "quick" in store.known

    store.write_s = 100 * FIRST_WRITE_S
    async with asyncio.timeout(20 * FIRST_WRITE_S):
        await write_behind.write_first(entry_of("slow"))

    store.up = store.answers = False
    monkeypatch.setattr("coordinator.persistence.write_behind.FIRST_WRITE_S", 100.0)  # which is for one that answers
    async with asyncio.timeout(20 * FIRST_WRITE_S):
        await write_behind.write_first(entry_of("away"))
    assert set(store.known) == {"quick"}


@pytest.mark.parametrize("write_s", [0.0, 2 * BATCH_S])
async def test_a_session_that_begins_is_written_once(write_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a batch comes while the first write is under way."""
    monkeypatch.setattr("coordinator.persistence.write_behind.FIRST_WRITE_S", 10.0)  # the machine may be busy
    write_behind = journal_over(store := SlowStore(write_s))
    running = asyncio.create_task(write_behind.run())
    entry = entry_of("new")
    write_behind.mark_changed(entry)
    await write_behind.write_first(entry)
    assert await write_behind.flush(10)
    await asyncio.sleep(3 * BATCH_S)
    assert (store.known, store.writes) == ({"new": 0}, 1)
    grow(entry)
    write_behind.mark_changed(entry)
    assert await write_behind.flush(10)
    assert (store.known, store.writes) == ({"new": 1}, 2)
    running.cancel()


async def test_a_flush_waits_for_the_batch_that_is_being_written() -> None:
    write_behind = journal_over(store := SlowStore(5 * BATCH_S))
    running = asyncio.create_task(write_behind.run())
    write_behind.mark_changed(entry_of("in the middle"))
    await asyncio.sleep(3 * BATCH_S)
    assert await write_behind.flush(10)
    assert "in the middle" in store.known
    running.cancel()


async def test_a_session_that_redis_did_not_take_at_its_beginning_is_written_later() -> None:
    """Nobody grows or opens it again: the batches alone bring it there."""
    write_behind = journal_over(store := SlowStore(5 * BATCH_S))
    running = asyncio.create_task(write_behind.run())
    store.answers = False
    entry = entry_of("late")
    write_behind.mark_changed(entry)
    await write_behind.write_first(entry)
    assert not store.known
    store.answers = True
    assert await write_behind.flush(10)
    assert store.known == {"late": 0}
    running.cancel()


async def test_a_session_that_begins_while_redis_seems_away_is_in_it_if_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One slow answer marks it as away for a moment: sessions of that moment are to survive their coordinator, too."""
    monkeypatch.setattr("coordinator.persistence.write_behind.FIRST_WRITE_DOWN_S", 10.0)  # the machine may be busy
    write_behind = journal_over(store := SlowStore())
    store.up = False
    await write_behind.write_first(entry_of("in between"))
    assert "in between" in store.known


async def test_many_sessions_are_written_less_often() -> None:
    """Writing takes time of the event loop that relays their tokens."""
    store = SlowStore(0.0)
    write_behind = journal_over(store)
    running = asyncio.create_task(write_behind.run())
    entries = [entry_of(str(number)) for number in range(100)]
    began = asyncio.get_running_loop().time()
    for _ in range(30):
        for entry in entries:
            grow(entry)
            write_behind.mark_changed(entry)
        await asyncio.sleep(0.02)
    running.cancel()
    took_s = asyncio.get_running_loop().time() - began
    assert len(entries) < store.writes <= SESSIONS_PER_S * took_s + 3 * len(entries)


async def test_an_end_that_is_awaited_is_written_though_redis_lost_the_session() -> None:
    store = SlowStore()
    write_behind, entry = journal_over(store), entry_of("s")
    await write_behind.write_first(entry)
    store.known.clear()
    grow(entry)
    entry.record.finish_reason = FinishReason.STOP
    await write_behind.write_first(entry)
    assert entry.current
    assert store.known == {"s": 1}
    assert store.finished == {"s"}


async def test_a_store_that_is_away_costs_a_few_attempts_however_many_sessions_wait() -> None:
    """Thousands of attempts stopped the event loop for seconds, again and again."""
    store = SlowStore(0.0)
    write_behind = journal_over(store)
    for number in range(1000):
        write_behind.mark_changed(entry_of(str(number)))
    store.answers = False
    running = asyncio.create_task(write_behind.run())
    assert await until(lambda: store.writes > 0, 5)
    await asyncio.sleep(MAX_BATCH_S + 2 * RETRY_S)
    assert store.writes <= 4 * MAX_CONNECTIONS
    assert write_behind.unwritten == 1000
    store.answers = True
    assert await until(lambda: write_behind.unwritten == 0, 10)
    assert len(store.known) == 1000
    running.cancel()


@pytest.mark.parametrize("refused", [1, MAX_CONNECTIONS])
async def test_sessions_that_redis_never_takes_keep_no_other_from_it(refused: int) -> None:
    """Their failures look as if Redis were away."""
    store = SlowStore(0.0)
    store.refused = {str(number) for number in range(refused)}
    write_behind = journal_over(store)
    for number in range(3 * MAX_CONNECTIONS):
        write_behind.mark_changed(entry_of(str(number)))
    running = asyncio.create_task(write_behind.run())
    assert await until(lambda: write_behind.unwritten == refused, 5)
    assert len(store.known) == 3 * MAX_CONNECTIONS - refused
    running.cancel()


async def test_what_its_coordinator_has_forgotten_does_not_wait_for_redis() -> None:
    store = SlowStore(0.0)
    store.answers = False
    write_behind = journal_over(store)
    for number in range(3 * MAX_CONNECTIONS):
        write_behind.mark_changed(entry_of(str(number)))
    running = asyncio.create_task(write_behind.run())
    assert await until(lambda: store.writes > 0, 5)
    assert write_behind.unwritten == 3 * MAX_CONNECTIONS
    store.forgotten = {str(number) for number in range(1, 3 * MAX_CONNECTIONS)}
    assert await until(lambda: write_behind.unwritten == 1, 5)
    store.answers = True
    assert await until(lambda: set(store.known) == {"0"}, 5)
    running.cancel()
