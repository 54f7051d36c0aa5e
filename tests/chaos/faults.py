"""Faults of a campaign: drawn from a seed, injected alone or several at a time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from outrider.testing.link_emulator import LinkShape
from tests.chaos.fleet import Fleet, Member
from tests.chaos.ledger import Fault, Ledger

MEAN_PAUSE_S = 2.5
ALONE = 0.4  # share of faults injected into a healthy fleet, with recovery before the next one
CALM_S = 1.5
RECOVERS_S = 90.0
_JUMPS_S = (-3600.0, -30.0, 30.0, 1200.0)


@dataclass(frozen=True, slots=True)
class Strike:
    kind: str
    target: str
    seconds: float
    pause_s: float
    alone: bool


class Faults:
    def __init__(self, fleet: Fleet, ledger: Ledger, seed: int, mean_pause_s: float = MEAN_PAUSE_S) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._random = random.Random(f"{seed}/faults")
        self._mean_pause_s = mean_pause_s
        self._busy: dict[str, asyncio.Task[None]] = {}
        self.skipped: list[str] = [] if fleet.has_clocks else ["clock: no C compiler here"]

    # Drawing faults.

    def _kinds(self) -> list[tuple[int, str, list[str], Callable[[str, Fault, float], Awaitable[None]]]]:
        """Return weight, kind, targets and function of each fault."""
        fleet = self._fleet
        services = [member.name for member in (*fleet.coordinators, *fleet.verifiers, *fleet.drafters)]
        python = services
        everybody = [*services, "redis"]
        links = sorted(fleet.links)
        kinds = [
            (10, "kill", [*everybody, *(each.name for each in fleet.verifiers)], self._kill),
            (4, "terminate", services, self._terminate),
            (8, "stop", everybody, self._stop),
            (6, "reset", links, self._reset),
            (4, "refuse", links, self._refuse),
            (5, "delay", links, self._delay),
            (5, "bandwidth", links, self._bandwidth),
            (6, "stall", links, self._stall),
            (2, "flush", ["redis"], self._flush),
            (2, "full disk", ["redis"], self._fill_disk),
            (3, "full disk", python, self._fill_disk),
            (4, "clock", everybody, self._move_clock),
        ]
        return [each for each in kinds if each[1] != "clock" or fleet.has_clocks]

    def strikes(self) -> Iterator[Strike]:
        """Yield an endless sequence of faults that depends on the seed only."""
        rng, kinds = self._random, self._kinds()
        while True:
            _, kind, targets, _ = rng.choices(kinds, [each[0] for each in kinds])[0]
            yield Strike(
                kind,
                rng.choice(targets),
                rng.uniform(0.3, 5.0),
                rng.expovariate(1 / self._mean_pause_s),
                rng.random() < ALONE,
            )

    # Injecting faults.

    async def run(self, over: Callable[[], bool]) -> None:
        """Inject faults until the end, then repair everything."""
        for strike in self.strikes():
            if over():
                break
            if strike.alone:
                await self.settle()
                await asyncio.sleep(CALM_S)
            else:
                await asyncio.sleep(strike.pause_s)
                if strike.target in self._busy:
                    continue
            self._begin(strike)
            if strike.alone:
                await self.settle()
        await self.settle()

    async def settle(self) -> None:
        """Wait until all faults have ended and the fleet is complete."""
        await asyncio.gather(*self._busy.values())
        try:
            await self._fleet.until_whole(RECOVERS_S)
        except AssertionError as error:
            self._ledger.wrong("not whole", 1, str(error))

    def _begin(self, strike: Strike) -> None:
        """Start a fault and log it. The seed and the order of these lines reproduce a campaign."""
        do = next(do for _, kind, targets, do in self._kinds() if kind == strike.kind and strike.target in targets)
        fault = self._ledger.fault(strike.kind, strike.target, alone=strike.alone)
        fault.alone = strike.alone and not self._busy
        self._ledger.note(f"{strike.kind} {strike.target} for {strike.seconds:.1f} s{', alone' * fault.alone}")

        async def inflict() -> None:
            try:
                await do(strike.target, fault, strike.seconds)
            finally:
                now = time.monotonic()
                fault.end = min(fault.end, now)
                fault.up = now
                self._busy.pop(strike.target, None)
                self._ledger.note(f"over: {strike.kind} {strike.target} after {now - fault.start:.1f} s")

        self._busy[strike.target] = asyncio.create_task(inflict())

    def _member(self, name: str) -> Member:
        return next(member for member in self._fleet.members if member.name == name)

    # Processes.

    async def _kill(self, name: str, fault: Fault, seconds: float) -> None:
        member = self._member(name)
        await asyncio.to_thread(member.kill)
        await self._return(member, fault, seconds / 2)

    async def _terminate(self, name: str, fault: Fault, seconds: float) -> None:
        member = self._member(name)
        member.terminate()
        await asyncio.to_thread(member.wait, 30)
        await self._return(member, fault, seconds / 2)

    async def _return(self, member: Member, fault: Fault, seconds: float) -> None:
        fault.end = time.monotonic()
        if member.clock:
            member.clock.jump(0)
        await asyncio.sleep(seconds)
        member.start()
        await self._fleet.ready(member)

    async def _stop(self, name: str, fault: Fault, seconds: float) -> None:
        member = self._member(name)
        member.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                member.signal(signal.SIGCONT)

    # Links.

    async def _reset(self, name: str, fault: Fault, seconds: float) -> None:
        self._fleet.links[name].cut()

    async def _refuse(self, name: str, fault: Fault, seconds: float) -> None:
        link = self._fleet.links[name]
        link.cut(refuse=True)
        await asyncio.sleep(seconds)
        link.heal()

    async def _stall(self, name: str, fault: Fault, seconds: float) -> None:
        link = self._fleet.links[name]
        link.stall()
        await asyncio.sleep(seconds)
        link.heal()

    async def _delay(self, name: str, fault: Fault, seconds: float) -> None:
        await self._shaped(name, LinkShape(delay_ms=40 * seconds, jitter_ms=10 * seconds), 2 * seconds)

    async def _bandwidth(self, name: str, fault: Fault, seconds: float) -> None:
        await self._shaped(name, LinkShape(bytes_per_s=20_000 * seconds), 2 * seconds)

    async def _shaped(self, name: str, shape: LinkShape, seconds: float) -> None:
        link = self._fleet.links[name]
        link.shape = shape
        await asyncio.sleep(seconds)
        link.shape = LinkShape()

    # Redis.

    async def _flush(self, name: str, fault: Fault, seconds: float) -> None:
        await self._fleet.flush()

    async def _fill_disk(self, name: str, fault: Fault, seconds: float) -> None:
        member = self._member(name)
        member.fill_disk()
        try:
            await asyncio.sleep(2 * seconds)
        finally:
            member.free_disk()

    async def _move_clock(self, name: str, fault: Fault, seconds: float) -> None:
        clock = self._member(name).clock
        assert clock is not None
        clock.jump(_JUMPS_S[int(seconds * 1000) % len(_JUMPS_S)])
        await asyncio.sleep(seconds)
        clock.jump(0)
