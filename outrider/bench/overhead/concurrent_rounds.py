"""Rounds of concurrent sessions: their rate through one coordinator process, and the CPU time of each process."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider.base.aio import cancel_all
from outrider.bench.common.report import Row, Times
from outrider.client.aio import AsyncClient
from outrider.client.events import Tokens
from outrider.launch.stack import Stack
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import TokenKind

_START_S = 60.0
_PATIENCE_US = 1_000_000  # so that every round has its guesses
_SETTLE_S = 0.5
MOST_TOKENS = 1 << 27  # of all sessions, which are cancelled before
_FEW = 256  # sessions: fewer have no more tokens each


class _Counts:
    """Rounds and tokens of all sessions since the last reset."""

    def __init__(self) -> None:
        self.arrivals: dict[int, list[float]] = {}
        self.reset()

    def reset(self) -> None:
        self.started_at = time.perf_counter()
        self.tokens = self.rounds = 0
        for times in self.arrivals.values():
            times.clear()

    def add(self, session: int, tokens: Tokens) -> None:
        self.arrivals.setdefault(session, []).append(time.perf_counter())
        self.tokens += len(tokens.token_ids)
        self.rounds += sum(kind is not TokenKind.ACCEPTED for kind in tokens.kinds)  # a round ends with one such token


def measure_rounds(running: Stack, sessions: int, seconds: float, gamma: int) -> Row:
    """Return the rounds per second of these sessions together and the CPU time per committed token by process."""
    try:
        return asyncio.run(_measure(running, sessions, seconds, gamma))
    except TimeoutError as error:
        raise OutriderError(f"{sessions} sessions had no tokens or no guesses for {_START_S:g} s") from error


async def _measure(running: Stack, sessions: int, seconds: float, gamma: int) -> Row:
    counts = _Counts()
    clients = [AsyncClient(running.endpoints) for _ in range(min(sessions, 8))]
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS // max(_FEW, sessions), ignore_eos=True)
    reading = [asyncio.create_task(_read(clients[i % len(clients)], i, params, gamma, counts)) for i in range(sessions)]
    try:
        async with asyncio.timeout(_START_S):
            while len(counts.arrivals) < sessions:
                _check_running(reading)
                await asyncio.sleep(0.05)
            while counts.tokens <= gamma * counts.rounds:  # until every session has its drafter
                _check_running(reading)
                counts.reset()
                await asyncio.sleep(_SETTLE_S)
        counts.reset()
        before = cpu_seconds(running)
        await asyncio.sleep(seconds)
        async with asyncio.timeout(_START_S):
            while max(map(len, counts.arrivals.values())) < 2:  # on a busy machine
                _check_running(reading)
                await asyncio.sleep(_SETTLE_S)
        _check_running(reading)
        elapsed, after = time.perf_counter() - counts.started_at, cpu_seconds(running)
        gaps = [1000 * (b - a) for times in counts.arrivals.values() for a, b in itertools.pairwise(times)]
    finally:
        await cancel_all(reading)
        for client in clients:
            await client.close()
    cpu_s = {name: after[name] - before[name] for name in after}
    coordinator_s = sum(spent for name, spent in cpu_s.items() if name.startswith("coordinator"))
    return {
        "sessions": sessions,
        "rounds_per_s": counts.rounds / elapsed,
        "rounds_per_coordinator_cpu_s": counts.rounds / max(1e-9, coordinator_s),
        "tokens_per_round": counts.tokens / max(1, counts.rounds),
        "p50_ms": Times(gaps).median,
        "p99_ms": Times(gaps).p99,
        "cpu_us_per_token": {name: 1e6 * spent / max(1, counts.tokens) for name, spent in cpu_s.items()},
    }


def _check_running(reading: Sequence[asyncio.Task[None]]) -> None:
    """Raise the error of a session that has failed, or OutriderError for one that has ended."""
    for session, task in enumerate(reading):
        if task.done():
            task.result()
            raise OutriderError(f"session {session} ended before its rounds were measured")


async def _read(client: AsyncClient, session: int, params: SamplingParams, gamma: int, counts: _Counts) -> None:
    async for reply in client.generate(
        tokens=[session % 200, 2, 3], params=params, gamma=gamma, patience_us=_PATIENCE_US, ahead=False
    ):
        if isinstance(reply, Tokens):
            counts.add(session, reply)


def show_rounds(console: Console, rows: Sequence[Row]) -> None:
    table = Table("sessions", "rounds/s", "per CPU second of the coordinator", "p50 ms", "p99 ms", "CPU µs per token")
    for row in rows:
        spent = ", ".join(f"{name.partition('-')[0]} {us:.0f}" for name, us in row["cpu_us_per_token"].items())
        speeds = (f"{row[name]:.0f}" for name in ("rounds_per_s", "rounds_per_coordinator_cpu_s"))
        table.add_row(str(row["sessions"]), *speeds, f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}", spent)
    console.print(table)


def cpu_seconds(running: Stack) -> Mapping[str, float]:
    """Return the CPU time of every service so far; the system counts it in ticks."""
    spent = {"client": time.process_time()}
    for child in running.children:
        if child.process is not None:
            fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
            spent[child.name] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return spent
