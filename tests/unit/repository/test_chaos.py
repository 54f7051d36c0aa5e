"""The campaign's own judgement: what it must notice, and what it must let pass."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.cases import Answer, Case
from tests.chaos.clients import Got, Violation
from tests.chaos.faults import Faults
from tests.chaos.fleet import Clock, Fleet, Reading, clock_library
from tests.chaos.ledger import SETTLES_S, Fault, Ledger, Talk
from tests.chaos.report import Outcome, by_fault, compare, gap_after_kills, gaps_of

ANSWER = Answer([1, 2, 3, 4], "abcd", 2)
CASE = Case("greedy", "prompt", {"max_tokens": 4, "seed": 1}, answers=[ANSWER])


def got() -> tuple[Got, Ledger]:
    ledger = Ledger()
    return Got(CASE, ANSWER, ledger), ledger


def test_the_right_answer_passes() -> None:
    mine, ledger = got()
    mine.take(0, [1, 2], "ab")
    mine.take(2, [3, 4], "c")
    mine.say("d")
    mine.finish = 2
    mine.check()
    assert not ledger.violations


@pytest.mark.parametrize(
    ("position", "tokens", "text", "what"),
    [
        (2, [3], "c", "lost"),
        (0, [1, 2], "ab", "doubled"),
        (1, [9], "b", "wrong"),
        (1, [2, 3, 4, 5], "bcd", "wrong"),
        (1, [2], "x", "wrong"),
    ],
)
def test_what_is_not_the_answer_is_noticed(position: int, tokens: list[int], text: str, what: str) -> None:
    mine, ledger = got()
    mine.take(0, [1], "a")
    with pytest.raises(Violation):
        mine.take(position, tokens, text)
    assert ledger.counts[what] == 1


def test_an_answer_that_ends_early_is_noticed() -> None:
    mine, _ = got()
    mine.take(0, [1, 2], "ab")
    mine.finish = 2
    with pytest.raises(Violation, match="2 tokens early"):
        mine.check()


def test_under_rejection_the_length_is_what_can_be_checked() -> None:
    mine = Got(CASE, None, Ledger())
    mine.take(0, [7, 7, 7], "xyz")
    mine.finish = 2
    with pytest.raises(Violation, match="3 of 4"):
        mine.check()


@pytest.mark.parametrize(
    ("target", "ended_before_s", "expected"),
    [
        ("redis", 1.0, True),
        ("coordinator-0 redis", 1.0, True),
        ("redis", SETTLES_S + 1, False),
        ("verifier-0", 1.0, False),
        ("coordinator-0", 1.0, False),
    ],
)
def test_only_trouble_of_redis_excuses_a_lost_session(target: str, ended_before_s: float, expected: bool) -> None:
    ledger = Ledger()
    ledger.faults.append(Fault("kill", target, alone=True, start=0.0, end=100.0))
    assert ledger.may_be_lost(Talk("plain", began=100.0 + ended_before_s)) is expected


def test_a_gap_belongs_to_the_faults_that_it_overlaps() -> None:
    ledger = Ledger()
    ledger.talks = [Talk("plain", began=0.0, gaps=[(9.0, 12.0), (30.0, 39.0)])]
    ledger.faults = [Fault("kill", "verifier-0", True, 10.0, 10.1), Fault("stop", "verifier-0", False, 20.0, 21.0)]
    assert [gaps_of(ledger, fault) for fault in ledger.faults] == [[3.0], [0.05]]
    assert gap_after_kills(ledger) == 3.0
    assert by_fault(ledger)["kill verifier"]["alone_longest_s"] == 3.0


def test_sessions_of_slow_readers_say_nothing_of_gaps() -> None:
    ledger = Ledger()
    ledger.talks = [Talk("slow", began=0.0, paced=True, gaps=[(9.0, 12.0)])]
    assert gaps_of(ledger, Fault("kill", "verifier-0", True, 10.0, 10.1)) == []


def test_every_kind_of_failure_fails_the_campaign() -> None:
    fine = Outcome(1, 1.0, Ledger(), [], normal_s=1.0)
    assert fine.failures == []
    for what in ("wrong", "lost", "doubled", "error", "hang", "key", "lost session", "not whole"):
        ledger = Ledger()
        ledger.wrong(what, 1, "told")
        assert Outcome(1, 1.0, ledger, [], normal_s=1.0).failures == [f"1 {what}"]
    assert Outcome(1, 1.0, Ledger(), []).failures == ["the fleet did not come back to normal"]
    assert Outcome(1, 1.0, Ledger(), [], held=["a seat"], normal_s=1.0).failures == ["a seat"]


def test_leaks_are_told_from_noise() -> None:
    before = Reading(descriptors=30, threads=20, memory_mb=100.0)
    assert compare("drafter-0", before, Reading(35, 22, 120.0)) == []
    found = compare("drafter-0", before, Reading(80, 60, 300.0))
    assert [leak.what for leak in found] == ["descriptors", "threads", "memory_mb"]


async def test_a_seed_makes_a_campaign_again(tmp_path: Path) -> None:
    plans = []
    for number, seed in enumerate((5, 5, 6)):
        folder = tmp_path / str(number)
        folder.mkdir()
        fleet = Fleet(folder, seed)
        await fleet.lay_out()
        plans.append(list(itertools.islice(Faults(fleet, Ledger(), seed).strikes(), 200)))
        await fleet.close()
    assert plans[0] == plans[1] != plans[2]
    assert {strike.kind for strike in plans[0]} >= {"kill", "stop", "reset", "stall", "flush", "full disk", "delay"}


def test_a_clock_that_is_moved(tmp_path: Path) -> None:
    library = clock_library(tmp_path)
    if library is None:
        pytest.skip("no C compiler")
    clock = Clock(tmp_path / "clock", library)
    told = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    for offset in (0.0, 3600.0, -30.0):
        clock.jump(offset)
        found = subprocess.run(
            [sys.executable, "-c", told], env=clock.environment, capture_output=True, text=True, check=True
        )
        wall, date, monotonic = map(float, found.stdout.split())
        assert wall == pytest.approx(time.time() + offset, abs=5)
        assert date == pytest.approx(wall, abs=1)
        assert monotonic == pytest.approx(time.monotonic(), abs=5)
