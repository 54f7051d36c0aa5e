"""Fuzz campaign: every edge in turn with concurrent inputs, next to a neighbour client, and its report."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.fuzz import generators
from tests.fuzz.calls import Outcome, open_channel, send
from tests.fuzz.case import CASES, Case, kept
from tests.fuzz.corpus import Known
from tests.fuzz.fleet import Fleet, Neighbour, as_dict, gap_ms
from tests.fuzz.workers import Stage

CHANNELS = 4
AT_ONCE = {"http": 24, "grpc": 16, "verify": 16, "draft": 16, "workers": 10}
LOOK_S = 1.0  # interval of checks of logs and processes
FUZZED_S, QUIET_S = 6.0, 3.0  # alternating, if the neighbour is measured
STOP_AFTER = 25  # problems of one edge


@dataclass(slots=True)
class Problem:
    edge: str
    what: str
    number: int = -1  # of the input; -1: not of one input
    between: tuple[int, int] | None = None  # these inputs were in flight
    kept_as: str = ""

    def told(self, seed: int) -> str:
        where = f"--only {self.number}" if self.number >= 0 else ""
        again = f"python -m tests.fuzz --seed {seed} --edge {self.edge} {where}".rstrip()
        between = f" (of {self.between[0]} to {self.between[1]})" if self.between else ""
        return f"{self.edge}{between}: {self.what}\n    again: {again}" + (
            f"\n    kept: {self.kept_as}" if self.kept_as else ""
        )


@dataclass(slots=True)
class EdgeReport:
    edge: str
    inputs: int = 0
    cases: int = 0  # requests, connections, calls
    replayed: int = 0
    seconds: float = 0.0
    results: Counter[str] = field(default_factory=Counter)
    log_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)


class Campaign:
    """Campaign over one edge. `rate` limits inputs per second (0: none); `turns` measures the neighbour in between."""

    def __init__(self, fleet: Fleet, known: Known, seed: int, *, rate: float, turns: bool, keep: Path | None) -> None:
        self._fleet = fleet
        self._known = known
        self._seed = seed
        self._rate = rate
        self._turns = turns
        self._keep = keep
        self.fuzzed: list[tuple[float, float]] = []
        self.quiet: list[tuple[float, float]] = []
        self._go = asyncio.Event()

    async def edge(self, edge: str, inputs: int) -> EdgeReport:
        report = EdgeReport(edge)
        began, logged = time.monotonic(), self._fleet.log_bytes()
        channels = [open_channel(self._fleet.address(edge)) for _ in range(CHANNELS)]
        todo = self._todo(report, inputs)
        watching = asyncio.create_task(self._watch(report))
        stage = Stage(self._known, AT_ONCE[edge])
        late: list[tuple[int, Case]] = []
        await asyncio.gather(
            *(self._work(report, todo, channels[i % CHANNELS], stage, late) for i in range(AT_ONCE[edge]))
        )
        for number, case in late:
            await self._once_more(report, number, case, channels[0], stage)
        if stage.served:
            report.results["sessions at false workers"] = stage.served
        watching.cancel()
        for ended in await asyncio.gather(watching, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        for channel in channels:
            await channel.close()
        self._look(report, 0)
        report.seconds = round(time.monotonic() - began, 1)
        report.log_bytes = self._fleet.log_bytes() - logged
        return report

    def _todo(self, report: EdgeReport, inputs: int) -> Iterator[tuple[int, Case]]:
        """Yield the kept inputs, then new ones."""
        yield from ((-1, case) for case in kept(CASES, report.edge))
        for number in count():
            if report.inputs >= inputs:
                return
            case = self.case(report.edge, number)
            report.inputs += case.inputs
            report.cases += 1
            yield number, case

    async def _work(
        self,
        report: EdgeReport,
        todo: Iterator[tuple[int, Case]],
        channel: Any,
        stage: Stage,
        late: list[tuple[int, Case]],
    ) -> None:
        for number, case in todo:
            if len(report.problems) >= STOP_AFTER or self._fleet.dead():
                return
            await self._go.wait()
            started = time.monotonic()
            outcome = await self.one(case, channel, stage)
            report.replayed += number < 0
            report.results[outcome.result or "problem"] += 1
            if outcome.late:
                late.append((number, case))
            elif outcome.problem:
                self._note(report, number, case, outcome)
            if self._rate:
                each_s = AT_ONCE[report.edge] / self._rate
                await asyncio.sleep(max(0.0, each_s - (time.monotonic() - started)))

    def case(self, edge: str, number: int) -> Case:
        return generators.make(edge, self._seed, number, self._known)

    async def one(self, case: Case, channel: Any, stage: Stage) -> Outcome:
        if case.answers:
            return await stage.play(case, channel)
        return await send(case, channel, self._fleet.http, self._fleet.address(case.edge))

    async def _once_more(self, report: EdgeReport, number: int, case: Case, channel: Any, stage: Stage) -> None:
        """Repeat late inputs alone: slowness of a busy machine disappears, a hang does not."""
        report.results["late, in time alone"] += 1
        outcome = await self.one(case, channel, stage)
        if outcome.problem and len(report.problems) < STOP_AFTER:
            report.results["late, in time alone"] -= 1
            self._note(report, number, case, outcome)

    def _note(self, report: EdgeReport, number: int, case: Case, outcome: Outcome) -> None:
        problem = Problem(report.edge, f"{case.name}: {outcome.problem}", number)
        if self._keep is not None and number >= 0:
            problem.kept_as = str(case.keep(self._keep))
        report.problems.append(problem)
        print(problem.told(self._seed), flush=True)

    async def _watch(self, report: EdgeReport) -> None:
        """Check logs and processes, and alternate with turns for the neighbour alone."""
        looked_at, turn = 0, time.monotonic()
        self._go.set()
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._look(report, looked_at)
                looked_at = report.cases
                if self._turns and time.monotonic() - turn > FUZZED_S:
                    self.fuzzed.append((turn + 1, time.monotonic()))
                    self._go.clear()
                    await asyncio.sleep(1)  # inputs in flight end
                    alone = time.monotonic()
                    await asyncio.sleep(QUIET_S)
                    self.quiet.append((alone, time.monotonic()))
                    turn = time.monotonic()
                    self._go.set()
        finally:
            self._go.set()

    def _look(self, report: EdgeReport, since: int) -> None:
        for what in [*self._fleet.dead(), *self._fleet.complaints()]:
            problem = Problem(report.edge, what, between=(since, report.cases))
            report.problems.append(problem)
            print(problem.told(self._seed), flush=True)


async def run(
    fleet: Fleet,
    known: Known,
    edges: list[str],
    inputs: int,
    seed: int,
    *,
    rate: float,
    turns: bool,
    keep: Path | None,
) -> dict[str, Any]:
    """Fuzz all edges and return the report as JSON values."""
    campaign = Campaign(fleet, known, seed, rate=rate, turns=turns, keep=keep)
    neighbour = await asyncio.to_thread(Neighbour, fleet.coordinator.address, fleet.folder)
    began, before = time.monotonic(), fleet.footprints()
    problems: list[Problem] = []
    reports = []
    try:
        for edge in edges:
            reports.append(await campaign.edge(edge, inputs))
            problems += reports[-1].problems
            if fleet.dead():
                break
    finally:
        await asyncio.to_thread(neighbour.stop)
    if not fleet.dead():
        problems += [Problem("all", f"left over: {what}") for what in await asyncio.to_thread(fleet.left_over, before)]
    wrong = neighbour.wrong()
    problems += [Problem("all", f"the neighbour's answer: {answer}") for answer in wrong[:5]]
    answers = neighbour.answers()
    beside, alone = gap_ms(answers, campaign.fuzzed), gap_ms(answers, campaign.quiet)
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "inputs": sum(report.inputs for report in reports),
        "edges": [
            {
                "edge": report.edge,
                "inputs": report.inputs,
                "cases": report.cases,
                "replayed": report.replayed,
                "seconds": report.seconds,
                "log_bytes": report.log_bytes,
                "results": dict(report.results.most_common()),
                "problems": len(report.problems),
            }
            for report in reports
        ],
        "neighbour": {
            "answers": len(answers),
            "wrong": len(wrong),
            "gap_ms_beside": round(beside, 2),
            "gap_ms_alone": round(alone, 2),
            "ratio": round(beside / alone, 3) if alone else None,
        },
        "footprint": {"before": as_dict(before), "after": as_dict(fleet.footprints())},
        "problems": [problem.told(seed) for problem in problems],
    }
