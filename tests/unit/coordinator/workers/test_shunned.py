"""Who broke the protocol is left alone for a while, longer each time, and forgiven."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.workers import shunned
from coordinator.workers.shunned import FACTOR, FIRST_S, FORGIVEN_AFTER, MAX_S, ShunnedWorkers
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo

WORKER = WorkerInfo("w", Role.DRAFTER, "host:1", ModelInfo("m", "f"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shunning(clock: Clock) -> ShunnedWorkers:
    return ShunnedWorkers(clock)


def shunned_for(shunning: ShunnedWorkers, clock: Clock) -> float:
    """Break the protocol now, and wait until it is over."""
    began = clock.now
    shunning.report(WORKER, "nonsense")
    while shunning.is_shunned(WORKER):
        clock.now += 1.0
    return clock.now - began


def test_nobody_is_shunned_without_cause(shunning: ShunnedWorkers) -> None:
    assert not shunning.is_shunned(WORKER)


def test_it_takes_longer_every_time_up_to_a_limit(shunning: ShunnedWorkers, clock: Clock) -> None:
    times = [shunned_for(shunning, clock) for _ in range(6)]
    assert times[:3] == [FIRST_S, FIRST_S * FACTOR, FIRST_S * FACTOR**2]
    assert times[-1] == MAX_S


def test_a_worker_that_behaves_for_long_starts_anew(shunning: ShunnedWorkers, clock: Clock) -> None:
    shunned_for(shunning, clock)
    clock.now += FORGIVEN_AFTER * FIRST_S
    assert shunned_for(shunning, clock) == FIRST_S


def test_sessions_that_find_out_together_count_once_for_time_and_each_for_the_metric(
    shunning: ShunnedWorkers, clock: Clock
) -> None:
    for _ in range(9):
        shunning.report(WORKER, "nonsense")
    assert shunning.violations[Role.DRAFTER] == 9
    clock.now += FIRST_S
    assert not shunning.is_shunned(WORKER)


def test_another_name_at_the_same_address_is_the_same_worker_and_a_role_is_its_own(shunning: ShunnedWorkers) -> None:
    shunning.report(WORKER, "nonsense")
    assert shunning.is_shunned(replace(WORKER, worker_id="other"))
    assert shunning.is_shunned(replace(WORKER, address="elsewhere:1"))
    assert not shunning.is_shunned(replace(WORKER, worker_id="other", address="elsewhere:1"))
    assert not shunning.is_shunned(replace(WORKER, role=Role.VERIFIER))


def test_the_word_of_a_verifier_counts_for_its_own_sessions(shunning: ShunnedWorkers, clock: Clock) -> None:
    shunning.report(WORKER, "nonsense", "v")
    assert shunning.is_shunned(replace(WORKER, address="elsewhere:1"), "v")
    assert not shunning.is_shunned(WORKER)
    assert not shunning.is_shunned(WORKER, "other")
    clock.now += FIRST_S
    assert not shunning.is_shunned(WORKER, "v")
    assert shunned_for(shunning, clock) == FIRST_S, "others learn nothing of it"


def test_it_is_said_once_each_time(shunning: ShunnedWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        shunning.report(WORKER, "nonsense")
    told = capsys.readouterr()
    assert (told.out + told.err).count("worker shunned: protocol violation") == 1


def test_what_is_remembered_is_bounded(shunning: ShunnedWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shunned, "_REMEMBERED", 4)
    for i in range(9):
        shunning.report(replace(WORKER, worker_id=f"w{i}", address=f"host:{i}"), "nonsense")
    assert len(shunning._entries) == 4
    assert shunning.is_shunned(replace(WORKER, worker_id="w8"))
