"""`outrider bench capacity`: how many more sessions a verifier serves when somebody else drafts."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.bench.capacity.concurrent_sessions import ConcurrentFigures, crowd
from outrider.bench.common.remote_pair import Paces, ToyPair, far, make_pair
from outrider.bench.common.report import Row, check_files, write_json
from outrider.cli import options

_ROUND_MS = 20.0  # of a verifier's step, per session: what makes sessions wait for each other
_LIGHT, _HEAVY = 0.05, 0.2  # of a verifier's step, to draft a token
_FULL = Paces("1:40,17:40,33:80,65:160,129:320", 4.0)  # a verifier that is full at 17 rows
_MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {"gamma": 0}),
    ("γ 2", {"gamma": 2, "ahead": False}),
    ("γ 6", {"gamma": 6, "ahead": False}),
    ("adaptive", {}),
)


def capacity(
    quick: Annotated[bool, options.option("--quick", "Fewer sessions, shorter answers.")] = False,
    gamma: Annotated[int, options.option("--gamma", "Tokens guessed per step.", min=1)] = 4,
    acceptance: Annotated[
        float, options.option("--acceptance", "How often the pair's first guess is to hold.", min=0.05, max=0.99)
    ] = 0.8,
    json_file: Annotated[Path | None, options.option("--json", "Write the results to this file.")] = None,
) -> None:
    """Sessions per verifier at equal time per token, drafting elsewhere against drafting on the verifier's own device;
    and what control makes of a verifier that fills up.

    Real services, paced engines. First a step takes 20 ms per session, so that the verifier is what sessions share.
    Drafting on the same device takes its share of every step; elsewhere it takes none. The bound is 1 + γ · t_draft /
    t_verify. Then a step takes 40 ms up to 17 tokens and twice as long for twice as many: the more sessions, the fewer
    guesses are worth their rows.
    """
    check_files(json_file, None)
    counts = (2, 4, 8) if quick else (2, 4, 6, 8, 12, 16)
    tokens = 48 if quick else 96
    console = Console()
    rows: list[Row] = []
    summary: dict[str, Any] = {"sessions_ratio": {}, "bound": {}, "of_bound": {}}
    with tempfile.TemporaryDirectory(prefix="outrider-pair-") as folder, _progress(console) as progress:
        task = progress.add_task("making a pair of tiny models", total=None)

        def say(text: str) -> None:
            progress.update(task, description=text)

        pair = make_pair(Path(folder), acceptance)
        for name, share in (("light", _LIGHT), ("heavy", _HEAVY)):
            draft_ms = share * _ROUND_MS
            places: dict[str, list[ConcurrentFigures]] = {}
            for place, paces in (
                ("elsewhere", Paces(_pace(gamma, _ROUND_MS), draft_ms)),
                ("on the same device", Paces(_pace(gamma, _ROUND_MS + gamma * draft_ms), 0.0)),
            ):
                drafting = f"{name}, {place}"
                places[place] = _measure(pair, paces, gamma, counts, tokens, f"drafting {drafting}", say)
                rows += [{"drafting": drafting, **_row(point)} for point in places[place]]
            elsewhere, together = places["elsewhere"], places["on the same device"]
            # As many sessions together as drafting elsewhere serves at the same time per token.
            ratios = [point.sessions / sessions_at(together, point.token_ms) for point in elsewhere[1:]]
            bound = 1.0 + gamma * share
            summary["sessions_ratio"][name] = statistics.median(ratios)
            summary["bound"][name] = bound
            summary["of_bound"][name] = statistics.median(ratios) / bound
        filled = _fill(pair, (1, 8) if quick else (1, 2, 4, 8, 16), tokens, say)
    rows += [{"mode": mode, **_row(point)} for mode, points in filled.items() for point in points]
    summary |= _filling(filled)
    _show(console, rows, summary)
    if json_file is not None:
        write_json(json_file, rows, summary, paced={"gamma": gamma, "session_ms": _ROUND_MS, "full": _FULL.verify})


def sessions_at(points: list[ConcurrentFigures], token_ms: float) -> float:
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
    pair: ToyPair,
    paces: Paces,
    gamma: int,
    counts: tuple[int, ...],
    tokens: int,
    what: str,
    say: Callable[[str], None],
) -> list[ConcurrentFigures]:
    points = []
    with far(pair, paces) as running:
        for sessions in counts:
            say(f"{what}: {sessions} sessions")
            points.append(crowd(running, sessions, tokens, {"gamma": gamma, "ahead": False}))
    return points


def _fill(
    pair: ToyPair, counts: tuple[int, ...], tokens: int, say: Callable[[str], None]
) -> dict[str, list[ConcurrentFigures]]:
    """More and more sessions on one verifier, in every mode."""
    found: dict[str, list[ConcurrentFigures]] = {mode: [] for mode, _ in _MODES}
    with far(pair, _FULL) as running:
        crowd(running, 1, tokens, {})  # what the pair shows is remembered
        for sessions in counts:
            for mode, wishes in _MODES:
                say(f"a verifier that fills up, {mode}: {sessions} sessions")
                found[mode].append(crowd(running, sessions, tokens, wishes))
    return found


def _filling(filled: dict[str, list[ConcurrentFigures]]) -> dict[str, Any]:
    adaptive = filled["adaptive"]
    best = [max(points) for points in zip(*([p.tokens_per_s for p in filled[m]] for m, _ in _MODES[:-1]), strict=True)]
    return {
        "full_adaptive_vs_plain": {
            str(point.sessions): point.tokens_per_s / plain.tokens_per_s
            for point, plain in zip(adaptive, filled["plain"], strict=True)
        },
        "full_adaptive_vs_best_fixed": {
            str(point.sessions): point.tokens_per_s / fixed for point, fixed in zip(adaptive, best, strict=True)
        },
        "full_guesses_per_step": {str(point.sessions): point.guesses_per_step for point in adaptive},
    }


def _row(point: ConcurrentFigures) -> Row:
    return {
        "sessions": point.sessions,
        "token_ms": point.token_ms,
        "tokens_per_s": point.tokens_per_s,
        "guesses_per_step": point.guesses_per_step,
    }


def _show(console: Console, rows: list[Row], summary: dict[str, Any]) -> None:
    _table(console, rows, "drafting", "token_ms", "milliseconds per token of a session")
    for name, ratio in summary["sessions_ratio"].items():
        bound, share = summary["bound"][name], summary["of_bound"][name]
        console.print(f"{name} drafter: {ratio:.2f} x the sessions; the bound is {bound:.2f}: {share:.2f} of it")
    _table(console, rows, "mode", "tokens_per_s", "tokens per second of all sessions, on a verifier that fills up")
    for sessions, guesses in summary["full_guesses_per_step"].items():
        console.print(
            f"{sessions} sessions: {summary['full_adaptive_vs_plain'][sessions]:.2f} x plain, "
            f"{summary['full_adaptive_vs_best_fixed'][sessions]:.2f} x the best fixed γ, {guesses:.1f} guesses a step"
        )


def _table(console: Console, rows: list[Row], what: str, value: str, title: str) -> None:
    rows = [row for row in rows if what in row]
    names = list(dict.fromkeys(row[what] for row in rows))
    table = Table("sessions", *names, title=title, title_justify="left")
    for sessions in sorted({row["sessions"] for row in rows}):
        found = {row[what]: row[value] for row in rows if row["sessions"] == sessions}
        table.add_row(str(sessions), *(f"{found[name]:.1f}" for name in names))
    console.print(table)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    )
