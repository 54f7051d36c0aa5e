"""`outrider bench capacity`: sessions per verifier with a remote drafter and with one on its device, or of fleets."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.base.config import option
from outrider.base.processes import end_on_signals
from outrider.bench.capacity.concurrent_sessions import ConcurrentFigures, run_sessions
from outrider.bench.common.progress import progress_spinner
from outrider.bench.common.remote_pair import ThrottledTimes, ToyPair, make_pair, remote_setup
from outrider.bench.common.report import Row, check_files, write_json
from outrider.bench.fleet import options
from outrider.bench.fleet.command import measure_fleets
from outrider.bench.fleet.options import check_flags

_GAMMA = 4
_ROUND_MS = 20.0  # of a verifier's step, per session: sessions must wait for each other
_LIGHT, _HEAVY = 0.05, 0.2  # time to draft a token, as share of a verifier's step
_FULL = ThrottledTimes("1:40,17:40,33:80,65:160,129:320", 4.0)  # a verifier that is full at 17 tokens
_MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {"gamma": 0}),
    ("γ 2", {"gamma": 2, "ahead": False}),
    ("γ 6", {"gamma": 6, "ahead": False}),
    ("adaptive", {}),
)


def capacity(
    context: typer.Context,
    quick: Annotated[bool, option("--quick", "Fewer sessions, shorter answers.")] = False,
    gamma: Annotated[
        int | None, option("--gamma", "Tokens guessed per step; none: 4, with --fleet adaptive.", min=0)
    ] = None,
    acceptance: Annotated[
        float, option("--acceptance", "Acceptance of the toy pair's first guess.", min=0.05, max=0.99)
    ] = 0.8,
    json_file: Annotated[Path | None, option("--json", "Write the results to this file.")] = None,
    plot_file: Annotated[Path | None, option("--plot", "Draw the fleets' results into this .png file.")] = None,
    fleet: options.Fleet = False,
    verifiers: options.Verifiers = "",
    coordinators: options.Coordinators = "",
    drafters: options.Drafters = "",
    sessions: options.Sessions = "",
    seconds: options.Seconds = None,
    tokens: options.Tokens = 64,
    system_prompts: options.SystemPrompts = 4,
    prompts: options.Prompts = None,
    target: options.Target = "",
    drafter: options.Drafter = "",
    verify_pace: options.VerifyPace = "",
    settings: options.Set = None,
    endpoint: options.Endpoint = "",
    api_key: options.ApiKey = "",
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    tls_name: options.TlsName = "",
    model: options.Model = "",
) -> None:
    """Measure how many sessions verifiers serve, with drafters elsewhere and on their own device; or whole fleets.

    The services are real, the engines throttled. First a step takes 20 ms per session, so the verifier is the
    bottleneck. A drafter on the same device takes its share of every step; a remote one takes none. The bound is
    1 + γ · t_draft / t_verify. Then the verifier fills up: a step takes 40 ms up to 17 tokens and twice as long for
    twice as many. With more sessions, fewer guesses pay for their tokens in the batch.

    --fleet starts fleets of several sizes on this machine instead, or measures one that runs (--endpoint). Concurrent
    sessions ask again and again, with shared system prompts. Ctrl-C and SIGTERM end it with the results so far.
    """
    check_files(json_file, plot_file)
    check_flags(context)
    if fleet:
        measure_fleets(context.params)
    else:
        _compare_places(quick, gamma or _GAMMA, acceptance, json_file)


def _compare_places(quick: bool, gamma: int, acceptance: float, json_file: Path | None) -> None:
    end_on_signals()
    counts = (2, 4, 8) if quick else (2, 4, 6, 8, 12, 16)
    tokens = max(48 if quick else 96, 6 * (gamma + 1))  # several verdicts, however many guesses hold
    console = Console()
    rows: list[Row] = []
    summary: dict[str, Any] = {"sessions_ratio": {}, "bound": {}, "of_bound": {}}
    with tempfile.TemporaryDirectory(prefix="outrider-pair-") as folder, progress_spinner(console) as notify:
        notify("creating toy models")
        pair = make_pair(Path(folder), acceptance)
        for name, share in (("light", _LIGHT), ("heavy", _HEAVY)):
            draft_ms = share * _ROUND_MS
            places: dict[str, list[ConcurrentFigures]] = {}
            for place, times in (
                ("elsewhere", ThrottledTimes(_verify_times(gamma, _ROUND_MS), draft_ms)),
                ("on the same device", ThrottledTimes(_verify_times(gamma, _ROUND_MS + gamma * draft_ms), 0.0)),
            ):
                drafting = f"{name}, {place}"
                places[place] = _measure(pair, times, gamma, counts, tokens, f"drafting {drafting}", notify)
                rows += [{"drafting": drafting, **asdict(point)} for point in places[place]]
            remote, local = places["elsewhere"], places["on the same device"]
            # Sessions with the remote drafter over those with the local one, at the same time per token.
            ratios = [point.sessions / sessions_at(local, point.token_ms) for point in remote[1:]]
            bound = 1.0 + gamma * share
            summary["sessions_ratio"][name] = statistics.median(ratios)
            summary["bound"][name] = bound
            summary["of_bound"][name] = statistics.median(ratios) / bound
        filled = _measure_full(pair, (1, 8) if quick else (1, 2, 4, 8, 16), tokens, notify)
    rows += [{"mode": mode, **asdict(point)} for mode, points in filled.items() for point in points]
    summary |= _full_summary(filled)
    _show(console, rows, summary)
    if json_file is not None:
        write_json(json_file, rows, summary, paced={"gamma": gamma, "session_ms": _ROUND_MS, "full": _FULL.verify})


def sessions_at(points: list[ConcurrentFigures], token_ms: float) -> float:
    """Return the number of sessions at this time per token, by linear interpolation or extrapolation."""
    for before, after in pairwise(points):
        if token_ms <= after.token_ms or after is points[-1]:
            slope = (after.sessions - before.sessions) / max(1e-9, after.token_ms - before.token_ms)
            return max(1e-3, before.sessions + slope * (token_ms - before.token_ms))
    raise ValueError("interpolation needs two points")


def _verify_times(gamma: int, session_ms: float) -> str:
    """Return the verifier's `--pace`: milliseconds per session that checks γ guesses."""
    count = gamma + 1
    return f"1:{session_ms:g},{count}:{session_ms:g},{2 * count}:{2 * session_ms:g},{64 * count}:{64 * session_ms:g}"


def _measure(
    pair: ToyPair,
    times: ThrottledTimes,
    gamma: int,
    counts: tuple[int, ...],
    tokens: int,
    what: str,
    notify: Callable[[str], None],
) -> list[ConcurrentFigures]:
    points = []
    with remote_setup(pair, times) as running:
        for sessions in counts:
            notify(f"{what}: {sessions} sessions")
            points.append(run_sessions(running, sessions, tokens, {"gamma": gamma, "ahead": False}))
    return points


def _measure_full(
    pair: ToyPair, counts: tuple[int, ...], tokens: int, notify: Callable[[str], None]
) -> dict[str, list[ConcurrentFigures]]:
    """Measure a growing number of sessions on one verifier, in every mode."""
    by_mode: dict[str, list[ConcurrentFigures]] = {mode: [] for mode, _ in _MODES}
    with remote_setup(pair, _FULL) as running:
        run_sessions(running, 1, tokens, {})  # fills the pair history
        for sessions in counts:
            for mode, request_options in _MODES:
                notify(f"a verifier that fills up, {mode}: {sessions} sessions")
                by_mode[mode].append(run_sessions(running, sessions, tokens, request_options))
    return by_mode


def _full_summary(filled: dict[str, list[ConcurrentFigures]]) -> dict[str, Any]:
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
        by_name = {row[what]: row[value] for row in rows if row["sessions"] == sessions}
        table.add_row(str(sessions), *(f"{by_name[name]:.1f}" for name in names))
    console.print(table)
