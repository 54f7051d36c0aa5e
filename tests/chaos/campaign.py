"""Fault campaign: prepare, warm up, inject faults, settle, report."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from outrider.client.aio import AsyncClient
from tests.chaos.cases import Case, load
from tests.chaos.clients import Customer, GrpcCustomer
from tests.chaos.faults import MEAN_PAUSE_S, Faults
from tests.chaos.fleet import Fleet, Reading
from tests.chaos.http_clients import HttpCustomer
from tests.chaos.ledger import Ledger
from tests.chaos.report import MAX_GAP_AFTER_KILL_S, Leak, Outcome, compare
from tests.cluster import ROOT, environment, until_async

CLIENTS = 32
WARM_S = 10.0
QUIET_S = 5.0
DRAINS_S = 60.0
SLACK_CONNECTIONS = 24  # to Redis


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    seconds: float
    clients: int = CLIENTS
    warm_s: float = WARM_S
    think_s: float = 2.0
    mean_pause_s: float = MEAN_PAUSE_S
    max_gap_s: float = MAX_GAP_AFTER_KILL_S
    flags: tuple[str, ...] = ()


def prepare(folder: Path, seed: int) -> list[Case]:
    """Create the models and the expected answers, with one engine in its own process."""
    with (folder / "cases.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "tests.chaos.cases", str(folder), str(seed)],
            check=True,
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=300,
        )
    return load(folder)


async def run(folder: Path, options: Options, say: Callable[[str], None] = lambda _: None) -> Outcome:
    say("computing the undisturbed answers")
    cases = await asyncio.to_thread(prepare, folder, options.seed)
    say("starting the fleet")
    async with Fleet(folder, options.seed, options.flags) as fleet:
        return await _Campaign(fleet, cases, options, say).run()


class _Campaign:
    def __init__(self, fleet: Fleet, cases: list[Case], options: Options, say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._cases = cases
        self._options = options
        self._say = say
        self._ledger = Ledger(say)
        self._faults = Faults(fleet, self._ledger, options.seed, options.mean_pause_s)
        self._leaving = False
        self._connections = 0

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread, as in a test
                loop.add_signal_handler(number, main.cancel)
        before = await self._warmed_up()
        self._say(f"troubling it for {self._options.seconds:.0f} s, {self._options.clients} clients")
        began = time.monotonic()
        deadline = began + self._options.seconds
        outcome = Outcome(
            self._options.seed, 0.0, self._ledger, self._faults.skipped, max_gap_s=self._options.max_gap_s
        )
        async with asyncio.TaskGroup() as group:
            customers = [group.create_task(each.run(lambda: self._leaving)) for each in self._customers()]
            progress = group.create_task(self._progress(began))
            await self._faults.run(lambda: time.monotonic() >= deadline)
            last = max((fault.end for fault in self._ledger.faults), default=began)
            outcome.normal_s = await self._time_to_normal(last)
            self._leaving = True
            await asyncio.gather(*customers)
            progress.cancel()
        outcome.seconds = time.monotonic() - began
        self._say("looking for what was left behind")
        outcome.held = await self._drained()
        await asyncio.sleep(QUIET_S)
        for member in self._fleet.members:
            outcome.leaks += compare(member.name, before[member.name], member.reading())
        connections = await self._fleet.redis_clients()
        if connections > self._connections + SLACK_CONNECTIONS:
            outcome.leaks.append(Leak("redis", "connections", self._connections, connections, self._connections))
        return outcome

    def _customers(self) -> list[Customer]:
        options = self._options
        return [
            (HttpCustomer if number % 2 else GrpcCustomer)(
                number, self._fleet, self._cases, self._ledger, options.seed, options.think_s
            )
            for number in range(options.clients)
        ]

    async def _warmed_up(self) -> dict[str, Reading]:
        """Run load without faults, then measure what each process holds when idle."""
        self._say("warming up")
        until = time.monotonic() + self._options.warm_s
        await asyncio.gather(*(each.run(lambda: time.monotonic() >= until) for each in self._customers()))
        await self._draft_in_a_grammar()
        held = await self._drained()
        if held:
            self._ledger.wrong("error", 1, f"before any fault: {held}")
        await asyncio.sleep(min(QUIET_S, self._options.warm_s))
        self._connections = await self._fleet.redis_clients()
        return {member.name: member.reading() for member in self._fleet.members}

    async def _draft_in_a_grammar(self) -> None:
        """Let the drafter without a model join a session with a grammar: for the first one it loads 80 MB."""
        case, fleet = next(case for case in self._cases if case.name == "schema"), self._fleet
        async with AsyncClient(list(fleet.endpoints), api_key=fleet.keys.api) as client:

            async def joined() -> bool:
                answer = await client.complete(case.prompt, params=case.sampling(), drafter="suffix", gamma=3)
                return bool(answer.finished.stats.drafters)

            await until_async(joined, DRAINS_S, "suffix drafter in a session with a grammar")

    async def _progress(self, began: float) -> None:
        while True:
            await asyncio.sleep(15)
            counts = self._ledger.counts
            self._say(
                f"{time.monotonic() - began:5.0f} s: {len(self._ledger.faults)} faults, {counts['sessions']} sessions, "
                f"{len(self._ledger.violations)} violations; under way: {self._oldest()}"
            )

    def _oldest(self) -> str:
        now = time.monotonic()
        going = [talk for talk in self._ledger.talks if talk.ended > now]
        oldest = min(going, key=lambda talk: talk.began, default=None)
        return f"{len(going)}" + (f", one of {now - oldest.began:.0f} s: {oldest.kind}" if oldest else "")

    async def _time_to_normal(self, last: float) -> float | None:
        """Wait after the last fault until the fleet is complete and answers as before."""
        case = next(case for case in self._cases if case.name == "greedy")
        probe = GrpcCustomer(-1, self._fleet, [case], self._ledger, self._options.seed, 0)
        try:
            async with asyncio.timeout(DRAINS_S):
                await probe.session(case, "plain")
        except TimeoutError:
            return None
        return time.monotonic() - last

    async def _drained(self) -> list[str]:
        """Return the session slots, blocks and waiting sessions that are still held without a client."""
        deadline = time.monotonic() + DRAINS_S
        while True:
            held = await self._held()
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.5)

    async def _held(self) -> list[str]:
        held = []
        for coordinator in self._fleet.coordinators:
            try:
                state = await self._fleet.state(coordinator)
            except (httpx.HTTPError, OSError) as error:
                return [f"{coordinator.name} does not answer: {type(error).__name__}"]
            if state["sessions"]:
                held.append(f"{coordinator.name} holds {state['sessions']} sessions")
            held += [problem for worker in state["workers"] for problem in _held_by(worker)]
        return held


def _held_by(worker: dict[str, Any]) -> list[str]:
    load, name = worker["load"], f"{worker['role']} {worker['worker_id']}"
    wanted = {name: load[name] for name in ("sessions", "waiting")}
    wanted["kv_tokens_used"] = load["kv_tokens_used"] - load["kv_tokens_idle"]
    return [f"{name} holds {count} {what}" for what, count in wanted.items() if count > 0]
