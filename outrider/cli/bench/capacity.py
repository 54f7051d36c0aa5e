"""`outrider bench capacity`: how many more sessions a verifier serves when somebody else drafts."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.cli import options
from outrider.cli.bench.far import Far, Paces, Pair, far, make_pair
from outrider.cli.bench.report import Row, check_files, write_json
from outrider.client import Client, Tokens
from outrider.messages import SamplingParams

_PROMPT = tuple(range(40, 56))
_TOGETHER_S = 30.0
_ROUND_MS = 20.0  # of a verifier's step, per session: what makes sessions wait for each other
_LIGHT, _HEAVY = 0.05, 0.2  # of a verifier's step, to draft a token


@dataclass(frozen=True, slots=True)
class Point:
    """So many sessions together."""

    sessions: int
    token_ms: float  # of each, between its tokens on average: the median of the sessions


def capacity(
    quick: Annotated[bool, options.option("--quick", "Fewer sessions, shorter answers.")] = False,
    gamma: Annotated[int, options.option("--gamma", "Tokens guessed per step.", min=1)] = 4,
    acceptance: Annotated[
        float, options.option("--acceptance", "How often the pair's first guess is to hold.", min=0.05, max=0.99)
    ] = 0.8,
    json_file: Annotated[Path | None, options.option("--json", "Write the results to this file.")] = None,
) -> None:
    """Sessions per verifier at equal time per token: drafting elsewhere against drafting on the verifier's own device.

    Real services, paced engines: a step takes 20 ms per session, so that the verifier is what sessions share. Drafting
    on the same device takes its share of every step; elsewhere it takes none. The bound is 1 + γ · t_draft / t_verify.
    """
    check_files(json_file, None)
    counts = (2, 4, 8) if quick else (2, 4, 6, 8, 12, 16)
    tokens = 48 if quick else 96
    console = Console()
    rows: list[Row] = []
    summary: dict[str, Any] = {"sessions_ratio": {}, "bound": {}, "of_bound": {}}
    with tempfile.TemporaryDirectory(prefix="outrider-pair-") as folder, _progress(console) as progress:
        task = progress.add_task("making a pair of tiny models", total=None)
        pair = make_pair(Path(folder), acceptance)
        for name, share in (("light", _LIGHT), ("heavy", _HEAVY)):
            draft_ms = share * _ROUND_MS
            places: dict[str, list[Point]] = {}
            for place, paces in (
                ("elsewhere", Paces(_pace(gamma, _ROUND_MS), draft_ms)),
                ("on the same device", Paces(_pace(gamma, _ROUND_MS + gamma * draft_ms), 0.0)),
            ):
                drafting = f"{name}, {place}"

                def say(sessions: int, drafting: str = drafting) -> None:
                    progress.update(task, description=f"drafting {drafting}: {sessions} sessions")

                places[place] = _measure(pair, paces, gamma, counts, tokens, say)
                rows += [{"drafting": drafting, **_row(point)} for point in places[place]]
            elsewhere, together = places["elsewhere"], places["on the same device"]
            # As many sessions together as drafting elsewhere serves at the same time per token.
            ratios = [point.sessions / sessions_at(together, point.token_ms) for point in elsewhere[1:]]
            bound = 1.0 + gamma * share
            summary["sessions_ratio"][name] = statistics.median(ratios)
            summary["bound"][name] = bound
            summary["of_bound"][name] = statistics.median(ratios) / bound
    _show(console, rows, summary)
    if json_file is not None:
        write_json(json_file, rows, summary, paced={"gamma": gamma, "session_ms": _ROUND_MS})


def sessions_at(points: list[Point], token_ms: float) -> float:
    """How many sessions get their tokens in this time: between two points on the line, beyond them along it."""
    for before, after in pairwise(points):
        if token_ms <= after.token_ms or after is points[-1]:
            slope = (after.sessions - before.sessions) / max(1e-9, after.token_ms - before.token_ms)
            return max(1e-3, before.sessions + slope * (token_ms - before.token_ms))
    raise ValueError("a line needs two points")


def _pace(gamma: int, session_ms: float) -> str:
    """A step takes so long per session that checks γ guesses in it."""
    rows = gamma + 1
    return f"1:{session_ms:g},{rows}:{session_ms:g},{2 * rows}:{2 * session_ms:g},{64 * rows}:{64 * session_ms:g}"


def _measure(
    pair: Pair, paces: Paces, gamma: int, counts: tuple[int, ...], tokens: int, say: Callable[[int], None]
) -> list[Point]:
    points = []
    with far(pair, paces) as running:
        for sessions in counts:
            say(sessions)
            points.append(Point(sessions, _token_ms(running, sessions, gamma, tokens)))
    return points


def _token_ms(running: Far, sessions: int, gamma: int, tokens: int) -> float:
    """All begin together; what counts is the time in which all of them decode."""
    took: list[list[tuple[float, int]]] = [[] for _ in range(sessions)]
    start = threading.Barrier(sessions, timeout=_TOGETHER_S)

    def follow(number: int) -> None:
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True)
        with _client(running) as client:
            start.wait()
            for reply in client.generate(tokens=_PROMPT, params=params, gamma=gamma, ahead=False):
                if isinstance(reply, Tokens):
                    took[number].append((time.perf_counter(), len(reply.token_ids)))

    with ThreadPoolExecutor(sessions) as threads:
        list(threads.map(follow, range(sessions)))
    first, last = max(chunks[0][0] for chunks in took), min(chunks[-1][0] for chunks in took)
    found = []
    for chunks in took:
        inside = [(at, count) for at, count in chunks if first <= at <= last]
        found.append(1000 * (inside[-1][0] - inside[0][0]) / max(1, sum(count for _, count in inside[1:])))
    return statistics.median(found)


@contextlib.contextmanager
def _client(running: Far) -> Iterator[Client]:
    with Client(running.endpoints) as client:
        yield client


def _row(point: Point) -> Row:
    return {"sessions": point.sessions, "token_ms": point.token_ms}


def _show(console: Console, rows: list[Row], summary: dict[str, Any]) -> None:
    names = list(dict.fromkeys(row["drafting"] for row in rows))
    table = Table("sessions", *names, title="milliseconds per token of a session", title_justify="left")
    for sessions in sorted({row["sessions"] for row in rows}):
        found = {row["drafting"]: row["token_ms"] for row in rows if row["sessions"] == sessions}
        table.add_row(str(sessions), *(f"{found[name]:.1f}" for name in names))
    console.print(table)
    for name, ratio in summary["sessions_ratio"].items():
        bound, share = summary["bound"][name], summary["of_bound"][name]
        console.print(f"{name} drafter: {ratio:.2f} x the sessions; the bound is {bound:.2f}: {share:.2f} of it")


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    )
