"""Who may be verified now: among several API keys, among priority classes, and alone."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from coordinator.admission.waiting import seats as module
from coordinator.admission.waiting.seats import AGEING_S, Capacity, Seats, capacity_of
from coordinator.workers.worker_pool import WorkerPool
from outrider.base.aio import until
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad


class Crowd:
    """Sessions that stay at a verifier until they are told to leave."""

    def __init__(self, room: Capacity, *, several: bool = True) -> None:
        self.room = room
        self.seats = Seats(lambda: self.room, several=lambda: several)
        self.inside: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(
        self, tenant: str, count: int, tokens: int = 10, priority: int = 0, *, resumed: bool = False
    ) -> None:
        for _ in range(count):
            name = f"{tenant} {len(self._tasks)}"
            self._leave[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._one(name, tokens, priority, resumed))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        for _ in range(5):
            await asyncio.sleep(0)

    async def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def of(self, tenant: str) -> int:
        return sum(name.startswith(tenant) for name in self.inside)

    async def _one(self, name: str, tokens: int, priority: int, resumed: bool) -> None:
        async with self.seats.taken(name.split()[0], tokens, priority, resumed=resumed):
            self.inside.append(name)
            with contextlib.suppress(asyncio.CancelledError):
                await self._leave[name].wait()
            self.inside.remove(name)


async def test_one_key_leaves_room_for_others_who_need_not_wait() -> None:
    crowd = Crowd(Capacity(64, 0))
    await crowd.come("greedy", 256)
    assert crowd.of("greedy") == 48
    await crowd.come("modest", 4)
    assert crowd.of("modest") == 4
    await crowd.come("third", 2)
    assert crowd.of("third") == 2
    assert len(crowd.inside) <= 64
    await crowd.cancel()
    assert crowd.inside == []


async def test_a_place_that_is_left_goes_to_the_key_that_holds_least() -> None:
    crowd = Crowd(Capacity(8, 0))
    await crowd.come("greedy", 20)
    await crowd.come("modest", 20)
    held = crowd.of("greedy"), crowd.of("modest")
    assert held == (6, 1), "all but the last seat, which nobody who has one may take"
    for _ in range(30):
        await crowd.leave(crowd.inside[0])
        assert crowd.of("modest") >= 1
    assert abs(crowd.of("greedy") - crowd.of("modest")) <= 6
    await crowd.cancel()


async def test_the_cache_is_shared_like_the_seats() -> None:
    crowd = Crowd(Capacity(64, 1000))
    await crowd.come("greedy", 30, tokens=100)
    assert crowd.of("greedy") == 7, "7 x 100 are at most three times the 300 that are left"
    await crowd.come("modest", 1, tokens=300)
    assert crowd.of("modest") == 1
    await crowd.cancel()


async def test_who_needs_less_does_not_pass_by_who_needs_more() -> None:
    crowd = Crowd(Capacity(64, 1000))
    await crowd.come("greedy", 7, tokens=100)
    await crowd.come("modest", 1, tokens=500)
    await crowd.come("greedy", 5, tokens=100)
    assert (crowd.of("greedy"), crowd.of("modest")) == (7, 0)
    for _ in range(2):
        await crowd.leave(next(name for name in crowd.inside))
    assert crowd.of("modest") == 1
    await crowd.cancel()


async def test_who_waits_for_its_own_sessions_keeps_no_other_waiting() -> None:
    """Whatever the others leave, its key may not have both of them at once."""
    crowd = Crowd(Capacity(64, 1000))
    await crowd.come("long", 1, tokens=700)
    await crowd.come("chats", 2, tokens=20)
    await crowd.come("long", 1, tokens=400)
    await crowd.come("chats", 3, tokens=20)
    assert (crowd.of("long"), crowd.of("chats")) == (1, 5)
    await crowd.leave("long 0")
    assert crowd.of("long") == 1, "the second one"
    await crowd.cancel()


async def test_one_that_is_larger_than_everything_is_let_through_alone() -> None:
    crowd = Crowd(Capacity(4, 100))
    await crowd.come("modest", 1, tokens=1000)
    assert crowd.of("modest") == 1, "its verifier refuses it in words"
    await crowd.cancel()


@pytest.mark.parametrize(("room", "several"), [(Capacity(0, 0), True), (Capacity(4, 40), False)])
async def test_nobody_waits_where_there_is_nothing_to_share(room: Capacity, several: bool) -> None:
    crowd = Crowd(room, several=several)
    await crowd.come("greedy", 20)
    assert crowd.of("greedy") == 20
    await crowd.cancel()


async def test_a_verifier_that_comes_makes_room() -> None:
    crowd = Crowd(Capacity(4, 0))
    await crowd.come("greedy", 8)
    assert crowd.of("greedy") == 3
    crowd.room = Capacity(16, 0)
    assert await until(lambda: crowd.of("greedy") == 8, 10)
    await crowd.cancel()


async def test_a_restart_of_the_only_verifier_lets_nobody_in_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that waited came to the next one at once, in any order, and beyond its own queue they were refused."""
    crowd = Crowd(Capacity(4, 100))
    await crowd.come("greedy", 8)
    crowd.room = Capacity(0, 0)  # as while it drains
    await crowd.come("other", 2)
    await crowd.leave("greedy 0")
    assert (crowd.of("greedy"), crowd.of("other")) == (2, 1)
    monkeypatch.setattr(module, "_RESTART_S", 0.0)  # it does not come back: those that wait learn of it
    await crowd.leave("greedy 1")
    assert (crowd.of("greedy"), crowd.of("other")) == (6, 2)
    await crowd.cancel()


async def test_those_that_lose_the_only_verifier_keep_their_turn() -> None:
    """Each left its seat before it came again, and one that had not begun took it."""
    seats = Seats(lambda: room, several=lambda: True)
    room, inside, over = Capacity(2, 100), list[str](), asyncio.Event()

    async def one(name: str, lost: asyncio.Event | None) -> None:
        if lost is not None:
            async with seats.taken(f"key {name}", 1):
                await lost.wait()
        async with seats.taken(f"key {name}", 1, resumed=lost is not None):
            inside.append(name)
            await over.wait()

    lost = asyncio.Event()
    tasks = [asyncio.create_task(one(f"{n}", lost if n < 2 else None)) for n in range(4)]
    await asyncio.sleep(0.01)
    room = Capacity(0, 0)
    lost.set()
    await asyncio.sleep(0.01)
    assert inside == ["0", "1"]
    over.set()
    await asyncio.gather(*tasks)


async def test_one_that_lost_its_verifier_does_not_wait_behind_those_that_have_yet_to_begin() -> None:
    crowd = Crowd(Capacity(8, 0))
    await crowd.come("greedy", 20)
    await crowd.come("greedy", 1, resumed=True)
    await crowd.leave(crowd.inside[0])
    assert crowd.inside[-1] == "greedy 20"
    await crowd.cancel()


async def test_one_that_lost_its_verifier_comes_before_new_ones_of_a_key_that_holds_less() -> None:
    crowd = Crowd(Capacity(2, 0))
    await crowd.come("moved", 1)
    await crowd.come("other", 1)
    await crowd.come("new", 1)
    await crowd.come("moved", 1, resumed=True)
    crowd.room = Capacity(4, 0)
    await crowd.leave("other 1")
    assert crowd.inside == ["moved 0", "moved 3", "new 2"]
    await crowd.cancel()


async def test_one_that_lost_its_verifier_and_has_to_wait_takes_no_others_of_its_class_along() -> None:
    crowd = Crowd(Capacity(4, 0))
    await crowd.come("moved", 3, priority=5)
    await crowd.come("other", 1)
    await crowd.come("moved", 1, priority=5, resumed=True)
    await crowd.come("batch", 1, priority=5)
    await crowd.come("urgent", 1)
    await crowd.leave("other 3")
    assert crowd.inside[-1] == "urgent 6", "one of `moved` has to end first"
    await crowd.cancel()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


async def served(crowd: Crowd, count: int) -> list[str]:
    """End sessions one after the other; return those that begin in their places."""
    begun = []
    for _ in range(count):
        before = set(crowd.inside)
        await crowd.leave(crowd.inside[0])
        begun += [name for name in crowd.inside if name not in before]
    return begun


@pytest.mark.parametrize("several", [True, False])
async def test_better_classes_are_served_first_and_equals_by_arrival(clock: Clock, several: bool) -> None:
    """Whether of one key or of several with equal numbers of seats."""
    crowd = Crowd(Capacity(2, 0), several=several)
    for number, priority in enumerate((1, 1, 5, 0, -3, 0, 5)):
        await crowd.come(f"key-{number}" if several else "key", 1, priority=priority)
        clock.now += 0.001
    assert len(crowd.inside) == 2
    assert [int(name.split()[1]) for name in await served(crowd, 5)] == [4, 3, 5, 2, 6]
    await crowd.cancel()


async def test_waiting_raises_a_class_slowly(clock: Clock) -> None:
    """A request of class 2 passes new ones of class 0 after two times the ageing, and not before."""
    for waited, first in ((1.9, "new"), (2.1, "old")):
        crowd = Crowd(Capacity(1, 0), several=False)
        await crowd.come("running", 1, priority=-9)
        await crowd.come("old", 1, priority=2)
        clock.now += waited * AGEING_S
        await crowd.come("new", 1)
        assert (await served(crowd, 1))[0].split()[0] == first
        await crowd.cancel()


async def test_no_class_starves_behind_a_stream_of_better_ones(clock: Clock) -> None:
    crowd = Crowd(Capacity(1, 0), several=False)
    await crowd.come("running", 1, priority=-9)
    await crowd.come("batch", 1, priority=3)
    begun, since = "", clock.now
    while not begun.startswith("batch"):
        await crowd.come("urgent", 1, priority=0)
        clock.now += 1.0
        assert clock.now - since < 100 * AGEING_S
        [begun] = await served(crowd, 1)
    assert clock.now - since == pytest.approx(3 * AGEING_S, abs=2.5)
    await crowd.cancel()


async def test_waiting_gives_no_key_more_than_another_of_its_class(clock: Clock) -> None:
    """As before there were classes: the key with fewer seats goes first, however long the other has waited."""
    crowd = Crowd(Capacity(64, 1000))
    await crowd.come("large", 1, tokens=700)
    await crowd.come("early", 1, tokens=100)
    await crowd.come("early", 1, tokens=250)
    clock.now += 100 * AGEING_S
    await crowd.come("late", 1, tokens=250)
    assert await served(crowd, 1) == ["late 3", "early 2"]
    await crowd.cancel()


async def test_a_better_class_takes_no_more_than_its_key_s_share() -> None:
    crowd = Crowd(Capacity(8, 0))
    await crowd.come("urgent", 20, priority=-5)
    assert crowd.of("urgent") == 6
    await crowd.come("batch", 2, priority=5)
    assert crowd.of("batch") == 1, "a key that has no seat gets the next one, whatever its class"
    await crowd.cancel()


async def test_an_open_server_holds_nothing_back_until_a_request_names_a_class() -> None:
    crowd = Crowd(Capacity(2, 0), several=False)
    await crowd.come("any", 6)
    assert len(crowd.inside) == 6, "the verifiers' own queues hold them"
    await crowd.come("any", 2, priority=1)
    await crowd.come("any", 1, priority=-1)
    assert len(crowd.inside) == 6, "all that began hold seats"
    order = [int(name.split()[1]) for name in await served(crowd, 7)]
    assert order == [8, 6, 7]
    await crowd.cancel()


async def test_one_that_lost_its_verifier_comes_before_better_classes() -> None:
    crowd = Crowd(Capacity(1, 0), several=False)
    await crowd.come("running", 1, priority=1)
    await crowd.come("urgent", 1, priority=-5)
    await crowd.come("moved", 1, priority=5, resumed=True)
    assert await served(crowd, 2) == ["moved 2", "urgent 1"]
    await crowd.cancel()


async def test_who_leaves_the_queue_leaves_nothing_behind() -> None:
    crowd = Crowd(Capacity(1, 0), several=False)
    await crowd.come("any", 3, priority=1)
    crowd._tasks["any 1"].cancel()
    assert await served(crowd, 1) == ["any 2"]
    await crowd.cancel()
    assert crowd.seats._tenants == {}
    assert crowd.seats._queues == {}


async def test_a_session_that_no_verifier_can_hold_keeps_nobody_waiting() -> None:
    """Its verifier refuses it in words."""
    crowd = Crowd(Capacity(4, 200, most=100))
    await crowd.come("modest", 1)
    await crowd.come("greedy", 1, tokens=1000)
    assert crowd.of("greedy") == 1, "it does not wait until the others have left"
    await crowd.come("other", 1)
    await crowd.leave("greedy 1")
    assert (crowd.of("modest"), crowd.of("other")) == (1, 1)
    await crowd.cancel()


def test_a_verifier_that_drains_has_no_seats() -> None:
    """Those who got one would only wait elsewhere."""
    info = WorkerInfo("v", Role.VERIFIER, "host:1", ModelInfo("m", "f"), capacity=4, load=WorkerLoad(kv_tokens_total=9))
    workers = [SimpleNamespace(info=each) for each in (info, replace(info, capacity=8, draining=True))]
    pool = cast(WorkerPool, SimpleNamespace(verifiers=lambda target: workers))
    assert capacity_of(pool, "f") == Capacity(4, 9, 9)
