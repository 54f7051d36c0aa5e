"""`outrider bench overhead`: cost of the services, measured with mock engines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.base.config import option
from outrider.bench.common.report import Row, Times, write_json
from outrider.client.sync import Client, Finished, Tokens
from outrider.launch.stack import LaunchPlan, stack
from outrider.protocol.sampling_params import SamplingParams

_WARM_UP_ROUNDS = 50


def overhead(
    rounds: Annotated[int, option("--rounds", "Rounds to measure.", min=100)] = 2000,
    gamma: Annotated[int, option("--gamma", "Tokens guessed per round.", min=1)] = 4,
    json_file: Annotated[Path | None, option("--json", "Write the results to this file.")] = None,
) -> None:
    """Measure what the three services add to a full draft → verify → commit round.

    The services and sockets are real. The mock engines answer at once, so all measured time is overhead.
    """
    plan = LaunchPlan(drafters=(("mock", ""),), engine="mock", port=0, threads=1)
    with stack(plan) as running, Client(running.endpoints) as client:
        _rounds(client, _WARM_UP_ROUNDS, gamma)
        speculative, stats = _rounds(client, rounds, gamma)
        plain, plain_stats = _rounds(client, rounds, 0)
        trips = {worker.kind: worker.round_trip_ms for worker in client.server().workers}
    wait, step, draft = stats.stats.mean_wait_ms, stats.stats.mean_step_ms, stats.stats.mean_draft_ms
    rows = [
        _row(f"round, γ = {gamma}", speculative),
        _row("plain step, γ = 0", plain),
    ]
    parts = {
        "verifier_step_ms": step,
        "drafter_ms": draft,
        "streams_and_coordinator_ms": wait - draft,
        "plain_verifier_step_ms": plain_stats.stats.mean_step_ms,
        "probe_round_trip_ms": trips,
    }
    summary = {
        "rounds_per_s": rows[0]["per_s"],
        "round_p50_ms": rows[0]["p50_ms"],
        "round_p99_ms": rows[0]["p99_ms"],
        "tokens_per_round": speculative[1] / max(1, len(speculative[0])),
        "parts": parts,
    }
    _show(rows, summary)
    if json_file is not None:
        write_json(json_file, rows, summary)


def _rounds(client: Client, rounds: int, gamma: int) -> tuple[tuple[list[float], int], Finished]:
    """Return the milliseconds between chunks, and the number of tokens. A chunk is the commit of one round."""
    params = SamplingParams(temperature=0.0, max_tokens=rounds * (gamma + 1), ignore_eos=True)
    gaps: list[float] = []
    tokens = 0
    last = 0.0
    for reply in client.generate(tokens=[1, 2, 3], params=params, gamma=gamma):
        now = time.perf_counter()
        if isinstance(reply, Tokens):
            tokens += len(reply.token_ids)
            if last:
                gaps.append(1000 * (now - last))
            last = now
        elif isinstance(reply, Finished):
            return (gaps, tokens), reply
    raise AssertionError("a stream ends with Finished or raises")


def _row(name: str, measured: tuple[list[float], int]) -> Row:
    gaps = Times(measured[0])
    return {
        "name": name,
        "rounds": len(gaps.ms),
        "p50_ms": gaps.median,
        "p99_ms": gaps.p99,
        "per_s": 1000 * len(gaps.ms) / sum(gaps.ms),
    }


def _show(rows: list[Row], summary: dict[str, Any]) -> None:
    console = Console()
    table = Table("", "rounds", "p50 ms", "p99 ms", "rounds/s")
    for row in rows:
        table.add_row(
            row["name"], str(row["rounds"]), f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}", f"{row['per_s']:.0f}"
        )
    console.print(table)
    parts = summary["parts"]
    console.print(
        f"of a round: verifier's step {parts['verifier_step_ms']:.2f} ms, drafter {parts['drafter_ms']:.2f} ms, "
        f"streams and coordinator {parts['streams_and_coordinator_ms']:.2f} ms"
    )
