"""Who may begin and who may be verified, among several API keys and alone."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from coordinator.admission.quotas import Quotas, TokenBucket
from coordinator.admission.seats import Capacity, Seats
from outrider.protocol.errors import Overloaded
from outrider.security.tenants import Tenant, TenantLimits
from outrider.settings.coordinator import CoordinatorSettings

GREEDY, MODEST, THIRD = Tenant("greedy"), Tenant("modest"), Tenant("third")


class Crowd:
    """Sessions that stay at a verifier until they are told to leave."""

    def __init__(self, room: Capacity, *, several: bool = True) -> None:
        self.room = room
        self.seats = Seats(lambda: self.room, several=lambda: several)
        self.inside: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, tenant: str, count: int, tokens: int = 10, *, resumed: bool = False) -> None:
        for _ in range(count):
            name = f"{tenant} {len(self._tasks)}"
            self._leave[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._one(name, tokens, resumed))
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

    async def _one(self, name: str, tokens: int, resumed: bool) -> None:
        async with self.seats.taken(name.split()[0], tokens, resumed=resumed):
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
    await asyncio.sleep(0.6)
    assert crowd.of("greedy") == 8
    await crowd.cancel()


async def test_one_that_lost_its_verifier_does_not_wait_behind_those_that_have_yet_to_begin() -> None:
    crowd = Crowd(Capacity(8, 0))
    await crowd.come("greedy", 20)
    await crowd.come("greedy", 1, resumed=True)
    await crowd.leave(crowd.inside[0])
    assert crowd.inside[-1] == "greedy 20"
    await crowd.cancel()


def refusal(quotas: Quotas, tenant: Tenant, held: int, live: int) -> Overloaded | None:
    try:
        quotas.admit(tenant, held, live)
    except Overloaded as error:
        return error
    return None


def test_one_key_cannot_hold_all_sessions() -> None:
    quotas = Quotas(CoordinatorSettings(max_sessions=512), several=lambda: True)
    assert refusal(quotas, GREEDY, 383, 383) is None
    full = refusal(quotas, GREEDY, 384, 384)
    assert full is not None
    assert (full.field, full.retry_after_ms) == ("key.sessions", 1000)
    assert refusal(quotas, MODEST, 0, 384) is None
    assert refusal(quotas, THIRD, 0, 512) is not None
    alone = Quotas(CoordinatorSettings(max_sessions=512), several=lambda: False)
    assert refusal(alone, GREEDY, 511, 511) is None


def test_limits_of_a_key_and_of_all_keys() -> None:
    settings = CoordinatorSettings(default_requests_per_minute=2, default_max_sessions=3, default_tokens_per_minute=100)
    quotas = Quotas(settings, several=lambda: True)
    assert [refusal(quotas, MODEST, 0, 0) is None for _ in range(3)] == [True, True, False]
    late = refusal(quotas, MODEST, 0, 0)
    assert late is not None
    assert late.field == "key.requests_per_minute"
    assert 0 < (late.retry_after_ms or 0) <= 30_000
    named = replace(GREEDY, limits=TenantLimits(requests_per_minute=0, max_sessions=5, tokens_per_minute=10))
    assert refusal(quotas, named, 4, 4) is None, "its own limits, not the default ones"
    assert refusal(quotas, named, 5, 5) is not None
    quotas.spend(named, 25)
    spent = refusal(quotas, named, 0, 0)
    assert spent is not None
    assert spent.field == "key.tokens_per_minute"
    assert 80_000 < (spent.retry_after_ms or 0) <= 96_000, "15 beyond the limit are paid back first"
    assert refusal(quotas, THIRD, 0, 0) is None


def test_a_bucket_fills_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    bucket = TokenBucket(60)
    bucket.take(60)
    assert bucket.wait_s() == pytest.approx(1.0)
    now += 0.5
    assert bucket.wait_s() == pytest.approx(0.5)
    now += 3600
    bucket.take(60)
    assert bucket.wait_s() == pytest.approx(1.0), "no more than a minute's worth is kept"
    unlimited = TokenBucket(0)
    unlimited.take(10**9)
    assert unlimited.wait_s() == 0.0
