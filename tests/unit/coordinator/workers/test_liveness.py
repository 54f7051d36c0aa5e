"""When a worker has been silent for too long, and when a verifier owes a verdict for too long."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from coordinator.workers import liveness
from coordinator.workers.liveness import TICK_S, VerdictDeadline
from coordinator.workers.worker_connection import SILENT_S, WorkerConnection
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.errors import OutriderError, PeerLost
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad

TIMEOUT_S = 10.0
IDLE = WorkerLoad()


def ticks_until_overdue(deadline: VerdictDeadline, load: WorkerLoad = IDLE, most: int = 10_000) -> float:
    """Seconds; infinity when it is given all that time."""
    for tick in range(most):
        if deadline.overdue_s(TICK_S, load, TIMEOUT_S):
            return tick * TICK_S
    return float("inf")


def begun() -> VerdictDeadline:
    deadline = VerdictDeadline(100)
    deadline.reset()
    return deadline


def test_a_verdict_is_due_within_the_limit() -> None:
    assert ticks_until_overdue(begun()) == TIMEOUT_S


def test_a_verdict_begins_the_time_anew() -> None:
    deadline = begun()
    for _ in range(100):
        assert not deadline.overdue_s(TIMEOUT_S / 2, IDLE, TIMEOUT_S)
        deadline.reset()


def test_slow_steps_and_patience_are_given_their_time() -> None:
    assert ticks_until_overdue(begun(), WorkerLoad(step_ms=2_000.0)) == TIMEOUT_S + 40.0
    patient = begun()
    patient.wait_timeout_s = 5.0
    assert ticks_until_overdue(patient) == TIMEOUT_S + 5.0


def test_a_prompt_is_given_its_time() -> None:
    quick = WorkerLoad(cost=CostCurve((1, 32), (10.0, 32.0)))
    assert ticks_until_overdue(VerdictDeadline(10_000), quick) == pytest.approx(2 * TIMEOUT_S + 200.0, abs=1)
    assert ticks_until_overdue(VerdictDeadline(10_000)) > ticks_until_overdue(VerdictDeadline(10_000), quick), (
        "where no cost is known"
    )


def test_waiting_for_room_is_no_debt_but_not_for_ever() -> None:
    full = WorkerLoad(waiting=1)
    assert 600 < ticks_until_overdue(VerdictDeadline(10), full) < 700
    assert ticks_until_overdue(begun(), full) == TIMEOUT_S, "a session that decodes waits for nobody"


class Stream:
    def __init__(self) -> None:
        self.why: OutriderError | None = None
        self.owes = 0.0

    def cancel(self, error: OutriderError) -> None:
        self.why = error

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        return self.owes


class Worker:
    """The part of a connection that is watched."""

    def __init__(self, role: Role) -> None:
        self.info = WorkerInfo("w", role, "host:1", ModelInfo("m", "f"))
        self.silent_s = self.watched_s = self.round_trip_ms = 0.0
        self.is_stuck = False
        self.streams = {Stream()}
        self.failures = 0

    @property
    def sessions(self) -> int:
        return len(self.streams)

    @property
    def is_silent(self) -> bool:
        return self.silent_s >= SILENT_S

    def record_failure(self) -> None:
        self.failures += 1

    def silent_for(self, seconds: float, *, spare: bool) -> OutriderError | None:
        for _ in range(int(seconds / TICK_S)):
            liveness._check(cast(WorkerConnection, self), lambda _: spare, TIMEOUT_S)
        return next(iter(self.streams)).why


@pytest.mark.parametrize(
    ("role", "spare", "seconds"),
    [(Role.VERIFIER, True, SILENT_S), (Role.VERIFIER, False, TIMEOUT_S), (Role.DRAFTER, False, SILENT_S)],
)
def test_a_silent_worker_loses_its_streams_sooner_where_another_can_take_them(
    role: Role, spare: bool, seconds: float
) -> None:
    worker = Worker(role)
    assert worker.silent_for(seconds - TICK_S, spare=spare) is None
    assert isinstance(worker.silent_for(TICK_S, spare=spare), PeerLost)
    assert worker.failures


def test_a_worker_that_was_never_reached_is_told_once() -> None:
    """Its --advertise is wrong, or a firewall is between: it registers, and has no session."""
    new, known = Worker(Role.DRAFTER), Worker(Role.DRAFTER)
    known.round_trip_ms = 1.0
    with capture_logs() as logs:
        for worker in (new, known):
            worker.silent_for(20 * SILENT_S, spare=True)
    told = [(entry["log_level"], entry["address"]) for entry in logs if entry["event"] == "worker cannot be reached"]
    assert told == [("warning", "host:1")]


def test_a_word_in_time_is_enough() -> None:
    worker = Worker(Role.VERIFIER)
    for _ in range(20):
        assert worker.silent_for(SILENT_S - TICK_S, spare=True) is None
        worker.silent_s = 0.0


def test_one_stream_that_is_owed_a_verdict_ends_alone() -> None:
    worker = Worker(Role.VERIFIER)
    owed = Stream()
    owed.owes = 11.0
    worker.streams.add(owed)
    liveness._check(cast(WorkerConnection, worker), lambda _: True, TIMEOUT_S)
    assert isinstance(owed.why, PeerLost)
    assert [stream.why for stream in worker.streams if stream is not owed] == [None]
    assert not worker.failures


class Due(Stream):
    """A stream with the deadline of a verifier's."""

    def __init__(self, deadline: VerdictDeadline) -> None:
        super().__init__()
        self.deadline = deadline

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        return self.deadline.overdue_s(tick_s, load, timeout_s)


@pytest.mark.parametrize("again", [False, True], ids=["hangs for good", "sends a verdict"])
def test_prompts_do_not_wait_for_room_at_a_verifier_that_owes_a_verdict(again: bool) -> None:
    """It answers probes, and reports that sessions wait: its engine hangs, and one that decodes is lost after 10 s."""
    worker = Worker(Role.VERIFIER)
    worker.info = replace(worker.info, load=WorkerLoad(waiting=1))
    decodes, waits = Due(begun()), Due(VerdictDeadline(10))
    worker.streams = {decodes, waits}
    ticks = 0
    while waits.why is None:
        liveness._check(cast(WorkerConnection, worker), lambda _: True, TIMEOUT_S)
        worker.silent_s, ticks = 0.0, ticks + 1
        worker.streams -= {decodes} if decodes.why else set()
        worker.is_stuck = worker.is_stuck and not again
    assert decodes.why is not None
    assert (600 < ticks * TICK_S < 700) if again else (30 < ticks * TICK_S < 50)


async def test_time_in_which_we_do_not_run_ourselves_counts_as_one_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that was stopped for a minute finds every worker as it left it."""
    worker = Worker(Role.VERIFIER)
    watched: list[Any] = [worker]
    clock = asyncio.get_running_loop().time
    skipped = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock() + skipped)
    task = asyncio.create_task(liveness.watch(lambda: watched, lambda _: True, TIMEOUT_S))
    await asyncio.sleep(0)
    skipped = 60.0
    await asyncio.sleep(TICK_S / 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 0 < worker.silent_s <= 2 * TICK_S
