"""Load of a fleet: concurrent sessions, each of which asks again when it is answered, for a given time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import signal
import time
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outrider.base.aio import cancel_all
from outrider.base.processes import collect_rarely
from outrider.bench.fleet.fleets import FleetUnderLoad, verifiers_of
from outrider.bench.fleet.prompts import PromptMix
from outrider.client.aio import AsyncClient
from outrider.client.events import Finished, Tokens
from outrider.protocol.errors import Expired, OutriderError, PeerLost, Unavailable

_RAMP_S = 0.05  # from the start of one session to the next: shared prefixes are cached by then
_WARM_UP_S = 30.0  # at most, until every session has its first token
_SETTLE_S = 1.0
_WATCH_S = 0.25
_SESSIONS_PER_CLIENT = 32  # that share a connection
_PAUSE_MS, _MOST_PAUSE_MS = 500, 5_000  # after a failed request
_PROBE_S = 120.0
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class LoadedAnswer:
    """Times of one request, in seconds of `time.perf_counter`."""

    asked_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # and the tokens that arrived together
    ended_at: float = math.inf
    finished: Finished | None = None
    error: str = ""  # its code


@dataclass(slots=True)
class LoadRecord:
    """Record of a fleet under a number of sessions. Figures are of the time from `began` to `ended`."""

    sessions: int
    answers: list[LoadedAnswer] = field(default_factory=list)
    verifier_sessions: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)  # when, and by verifier
    began: float = 0.0
    ended: float = 0.0
    cpu_s: Mapping[str, float] = field(default_factory=dict)  # by process on this machine


def check_answers(fleet: FleetUnderLoad, mix: PromptMix) -> None:
    """Ask for one answer, so that a request that can never succeed ends the benchmark at once."""

    async def ask() -> None:
        client = AsyncClient(fleet.endpoints, api_key=fleet.api_key, tls=fleet.tls, timeout_s=_PROBE_S)
        async with client:
            await client.complete(**mix.request(0, "check"))

    run_cancellable(ask())


def measure_load(fleet: FleetUnderLoad, mix: PromptMix, sessions: int, seconds: float) -> LoadRecord:
    """Return what these sessions saw; prefixes of other measurements are not found, because their salts differ."""
    return run_cancellable(_Load(fleet, mix, sessions, secrets.token_hex()).measure(seconds))


class _Load:
    def __init__(self, fleet: FleetUnderLoad, mix: PromptMix, sessions: int, salt: str) -> None:
        self._fleet = fleet
        self._mix = mix
        self._salt = salt
        self._record = LoadRecord(sessions)
        self._answered: set[int] = set()  # sessions with a token or an error
        number = max(len(fleet.endpoints), math.ceil(sessions / _SESSIONS_PER_CLIENT))
        self._clients = [
            AsyncClient(_rotated(fleet.endpoints, i), api_key=fleet.api_key, tls=fleet.tls) for i in range(number)
        ]

    async def measure(self, seconds: float) -> LoadRecord:
        collect_rarely()
        record = self._record
        tasks = {asyncio.create_task(self._ask_in_turn(session)) for session in range(record.sessions)}
        tasks.add(asyncio.create_task(self._watch_verifiers()))
        try:
            until = time.perf_counter() + _WARM_UP_S
            while len(self._answered) < record.sessions and time.perf_counter() < until:
                await _run_for(tasks, 0.05)
            await _run_for(tasks, _SETTLE_S)
            record.began, before = time.perf_counter(), self._fleet.cpu_seconds()
            await _run_for(tasks, seconds)
            record.ended, after = time.perf_counter(), self._fleet.cpu_seconds()
            record.cpu_s = {name: after[name] - before.get(name, 0.0) for name in after}
        finally:
            await cancel_all([*tasks])
            for client in self._clients:
                await client.close()
        return record

    async def _ask_in_turn(self, session: int) -> None:
        """Send one request after the other; a failed one is counted, and the next one waits."""
        client = self._clients[session % len(self._clients)]
        await asyncio.sleep(session * min(_RAMP_S, _WARM_UP_S / self._record.sessions / 2))
        for number in itertools.count(session, self._record.sessions):
            answer = LoadedAnswer(time.perf_counter())
            self._record.answers.append(answer)
            try:
                await self._ask(client, session, number, answer)
            except OutriderError as error:
                self._answered.add(session)
                answer.error, answer.ended_at = error.code, time.perf_counter()
                await asyncio.sleep(min(error.retry_after_ms or _PAUSE_MS, _MOST_PAUSE_MS) / 1000)

    async def _ask(self, client: AsyncClient, session: int, number: int, answer: LoadedAnswer) -> None:
        async with contextlib.aclosing(client.generate(**self._mix.request(number, self._salt))) as replies:
            async for reply in replies:
                if isinstance(reply, Tokens) and reply.token_ids:
                    answer.arrivals.append((time.perf_counter(), len(reply.token_ids)))
                    self._answered.add(session)
                elif isinstance(reply, Finished):
                    answer.finished, answer.ended_at = reply, time.perf_counter()

    async def _watch_verifiers(self) -> None:
        """Record the sessions of each verifier, as a coordinator tells them."""
        client = self._clients[0]
        served = await client.model(self._fleet.model)
        while True:
            # A coordinator that cannot be reached, or is too busy, shows in the failed requests.
            with contextlib.suppress(PeerLost, Unavailable, Expired):
                verifiers = verifiers_of((await client.server()).workers, served)
                loads = {each.worker_id: each.load.sessions + each.load.waiting for each in verifiers}
                self._record.verifier_sessions.append((time.perf_counter(), loads))
            await asyncio.sleep(_WATCH_S)


async def _run_for(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
    """Wait; raise the exception of a task that fails, which is an error of the benchmark."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def _rotated(endpoints: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return the endpoints from another one on, so that clients spread over them."""
    first = number % len(endpoints)
    return endpoints[first:] + endpoints[:first]


def run_cancellable(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine. Signals cancel it, so that it closes its calls, and then raise KeyboardInterrupt.

    An exception that a signal raises anywhere in the event loop could be lost in gRPC's callbacks.
    """
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    async def run() -> ResultT:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        taken = [each for each, handler in handlers.items() if handler != signal.SIG_IGN]
        for each in taken:
            loop.add_signal_handler(each, task.cancel)
        try:
            return await main
        finally:
            for each in taken:
                loop.remove_signal_handler(each)
                signal.signal(each, handlers[each])

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
