"""`outrider bench overhead`: cost of the services, measured with mock engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.base.config import option
from outrider.bench.common.report import Row, Times, check_files, write_json
from outrider.bench.common.timed_output import TimedOutput, timed
from outrider.bench.overhead.concurrent_rounds import MOST_TOKENS, measure_rounds, show_rounds
from outrider.client.sync import Client
from outrider.launch.services import read_assignments
from outrider.launch.stack import LaunchPlan, stack
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling_params import SamplingParams

_WARM_UP_ROUNDS = 50
_TRIES = 20  # of a session whose drafter may come too late
_MOST_SESSIONS = 1024


def overhead(
    rounds: Annotated[int, option("--rounds", "Rounds to measure.", min=100)] = 2000,
    gamma: Annotated[int, option("--gamma", "Tokens guessed per round.", min=1)] = 4,
    sessions: Annotated[str, option("--sessions", "Also measure so many sessions at once, such as 1,16,64,256.")] = "",
    seconds: Annotated[float, option("--seconds", "Duration of each measurement of --sessions.", min=1, max=15)] = 5.0,
    together: Annotated[bool, option("--together", "The drafter runs in the verifier's process.")] = False,
    json_file: Annotated[Path | None, option("--json", "Write the results to this file.")] = None,
) -> None:
    """Measure what the three services add to a full draft → verify → commit round.

    The services and sockets are real. The mock engines answer at once, so all measured time is overhead.
    """
    check_files(json_file, None)
    given = sessions.split(",") if sessions else []
    if not all(part.strip().isdecimal() and 0 < int(part) <= _MOST_SESSIONS for part in given):
        raise InvalidRequest.of("--sessions", sessions, f"numbers from 1 to {_MOST_SESSIONS}, separated by commas")
    counts = [int(part) for part in given]
    room = [f"{service}.max-sessions={max([64, *counts])}" for service in ("coordinator", "verifier", "drafter")]
    room.append(f"verifier.kv-tokens={2 * MOST_TOKENS}")
    mock = LaunchPlan(drafters=(("mock", ""),), engine="mock", port=0, threads=1, overrides=read_assignments(room))
    with stack(replace(mock, together=together)) as running, Client(running.endpoints) as client:
        _rounds(client, _WARM_UP_ROUNDS, gamma)
        speculative = _rounds(client, rounds, gamma)
        plain = _rounds(client, rounds, 0)
        concurrent = [measure_rounds(running, count, seconds, gamma) for count in counts]
        trips = {worker.kind: worker.round_trip_ms for worker in client.server().workers}
    stats = speculative.finished.stats
    rows = [_row(f"round, γ = {gamma}", speculative), _row("plain step, γ = 0", plain)]
    parts = {
        "verifier_step_ms": stats.mean_step_ms,
        "drafter_ms": stats.mean_draft_ms,
        "streams_and_coordinator_ms": stats.mean_wait_ms - stats.mean_draft_ms,
        "plain_verifier_step_ms": plain.finished.stats.mean_step_ms,
        "probe_round_trip_ms": trips,
    }
    summary = {
        "rounds_per_s": rows[0]["per_s"],
        "round_p50_ms": rows[0]["p50_ms"],
        "round_p99_ms": rows[0]["p99_ms"],
        "tokens_per_round": len(speculative.tokens) / len(speculative.arrivals),
        "parts": parts,
        "sessions": concurrent,
    }
    _show(rows, parts)
    if concurrent:
        show_rounds(Console(), concurrent)
    if json_file is not None:
        write_json(json_file, rows, summary)


def _rounds(client: Client, rounds: int, gamma: int) -> TimedOutput:
    """Generate for this number of rounds, one chunk each; again if the drafter comes too late for half of them."""
    params = SamplingParams(temperature=0.0, max_tokens=rounds * (gamma + 1), ignore_eos=True)
    for _ in range(_TRIES):
        output = timed(client.generate(tokens=[1, 2, 3], params=params, gamma=gamma))
        if output.finished.stats.draft_tokens >= rounds * gamma / 2:
            return output
    raise OutriderError(f"{_TRIES} sessions had few guesses or none before they ended")


def _row(name: str, output: TimedOutput) -> Row:
    gaps = Times(output.gaps_ms)
    return {
        "name": name,
        "rounds": len(gaps.ms),
        "p50_ms": gaps.median,
        "p99_ms": gaps.p99,
        "per_s": 1000 * len(gaps.ms) / sum(gaps.ms),
    }


def _show(rows: list[Row], parts: dict[str, Any]) -> None:
    console = Console()
    table = Table("", "rounds", "p50 ms", "p99 ms", "rounds/s")
    for row in rows:
        times = (f"{row[name]:.2f}" for name in ("p50_ms", "p99_ms"))
        table.add_row(row["name"], str(row["rounds"]), *times, f"{row['per_s']:.0f}")
    console.print(table)
    console.print(
        f"of a round: verifier's step {parts['verifier_step_ms']:.2f} ms, drafter {parts['drafter_ms']:.2f} ms, "
        f"streams and coordinator {parts['streams_and_coordinator_ms']:.2f} ms"
    )
