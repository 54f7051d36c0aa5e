"""A tenant with few sessions keeps its speed beside one with many, which gets what is left."""

from __future__ import annotations

from outrider.protocol.cost_curve import CostCurve
from verifier.shares.fair_shares import QUIET_S, FairShares
from verifier.step_times import StepTimes

COST = CostCurve((1, 8, 64, 128), (20.0, 22.0, 120.0, 240.0))
SEATS = 64
STRETCH = 1.05


def served(seconds: float, *, pause_s: float = 0.0, few: int = 1) -> tuple[float, float]:
    """Steps a second of the tenant with few sessions, and tokens a second of the one with 48, in simulated time."""
    times = StepTimes(COST)
    shares = FairShares(times, SEATS, STRETCH)
    tenants = ["modest"] * few + ["greedy"] * 48
    now, due, steps, tokens = 0.0, 0.0, 0, 0
    while now < seconds:
        assert shares.heavy_tenants(tenants) == {"greedy"}
        rows = few if now >= due else 0
        joined = min(48, shares.budget(now, rows, 512))
        if not rows and not joined:
            now += 0.01
            continue
        ms = COST.at(rows + joined)
        now += ms / 1000
        shares.charge([("modest", 1)] * rows + [("greedy", 1)] * joined, ms)
        tokens += joined
        if rows:
            steps += 1
            due = now + pause_s
    return steps / seconds, tokens / seconds


def test_few_sessions_keep_their_speed_and_many_are_not_starved() -> None:
    for few in (1, 2, 4):
        alone = 1000 / COST.at(few)
        steps, tokens = served(30, few=few)
        assert steps > 0.94 * alone
        assert tokens > 5


def test_time_that_few_sessions_leave_is_not_lost() -> None:
    """They wait for a drafter far away: short steps go in between, and cost them one such step at most."""
    alone = 1 / (0.5 + COST.at(1) / 1000)
    steps, tokens = served(30, pause_s=0.5)
    assert steps > 0.94 * alone
    assert tokens > 100
    assert QUIET_S < 0.5


def test_equals_are_not_kept_from_each_other() -> None:
    shares = FairShares(StepTimes(COST), SEATS, STRETCH)
    assert shares.heavy_tenants(["a"] * 64) == frozenset(), "alone"
    assert shares.heavy_tenants(["a"] * 30 + ["b"] * 30) == frozenset(), "both have many"
    assert shares.heavy_tenants(["a"] * 4 + ["b"] * 4) == frozenset(), "both have few"
    assert shares.heavy_tenants(["a"] * 40 + ["b"] * 20 + ["c"]) == {"a", "b"}
    assert shares.heavy_tenants([]) == frozenset()


def test_without_a_known_cost_they_share_by_tokens() -> None:
    shares = FairShares(StepTimes(CostCurve()), SEATS, STRETCH)
    shares.heavy_tenants(["a"] * 40 + ["b"])
    assert shares.budget(1.0, 3, 512) == 3
    shares.charge([("b", 1), ("a", 3)], 10.0)
    assert shares.budget(2.0, 3, 512) == 3


def test_a_debt_is_paid_before_more_is_taken() -> None:
    """A step that took longer than foreseen, for a prompt perhaps."""
    shares = FairShares(StepTimes(COST), SEATS, STRETCH)
    shares.heavy_tenants(["a"] * 40 + ["b"])
    shares.reset(0.0)
    shares.heavy_tenants(["a"] * 40 + ["b"])
    assert shares.budget(1.0, 1, 512) > 0
    shares.charge([("b", 1), ("a", 10)], 500.0)
    assert shares.budget(1.1, 1, 512) == 0
    assert shares.budget(10.0, 1, 512) > 0


def test_one_long_stall_is_owed_for_seconds_only() -> None:
    shares = FairShares(StepTimes(COST), SEATS, STRETCH)
    shares.reset(0.0)
    assert shares.heavy_tenants(["modest"] + ["greedy"] * 48)
    shares.charge([("modest", 1), ("greedy", 8)], 60_000.0)
    assert shares.budget(1.0, 1, 512) == 0
    assert shares.budget(3.0, 1, 512) > 0
