"""Console output of `outrider bench capacity --fleet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.bench.common.report import Row
from outrider.bench.fleet.figures import limit_of, machine_share, size_of
from outrider.bench.fleet.options import FleetSize

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ses-\nsions", "sessions", "d"),
    ("tokens\nper s", "tokens_per_s", ".0f"),
    ("× one\nverif.", "scaling", ".2f"),
    ("per s,\neach", "session_tokens_per_s", ".1f"),
    ("gap\np99", "between_tokens_p99_ms", ",.0f"),
    ("first\np50", "first_token_p50_ms", ",.0f"),
    ("first\np99", "first_token_p99_ms", ",.0f"),
    ("imba-\nlance", "imbalance", ".2f"),
    ("from\ncache", "cached_share", ".0%"),
    ("fail-\nures", "failed", "d"),
    ("\nCPU", "cpu", ".0%"),
)
_LEGEND = (
    "Fleet: verifiers + coordinators + drafters. Tokens per second of all sessions, over those of one verifier, and "
    "the median of each session. Milliseconds between tokens and to the first token. Sessions of the fullest verifier "
    "over the mean. Share of prompt tokens from the prefix cache. Share of this machine's CPU time."
)


def line(row: Row) -> str:
    """Return one measurement as a line of progress."""
    told = f"{size_of(row)}, {row['sessions']} sessions: {row['tokens_per_s']:.0f} tokens/s"
    first, failed = row["first_token_p50_ms"], sum(row["failures"].values())
    told += f", first token {first:,.0f} ms" if first is not None else ""
    return told + f", {failed} failed" * bool(failed)


def show(console: Console, rows: Sequence[Row], summary: Mapping[str, Any], about: str) -> None:
    """Print a table of all measurements, then what the highest throughput of each fleet was, and what to mind."""
    table = Table(box=box.SIMPLE_HEAD, title=about, title_justify="left", padding=0)
    table.add_column("\nfleet")
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        size = size_of(row)
        cells = row | {"failed": sum(row["failures"].values()), "cpu": machine_share(row)}
        shown = ("–" if cells[key] is None else format(cells[key], form) for _, key, form in _COLUMNS)
        table.add_row("+".join(map(str, astuple(size))), *shown)
    console.print(table)
    console.print(_LEGEND, style="dim", highlight=False)
    for fleet in summary["fleets"]:
        console.print(_peak(fleet), highlight=False, soft_wrap=True)
    for row in rows:
        where = f"{size_of(row)}, {row['sessions']} sessions"
        for code, count in row["failures"].items():
            console.print(f"{where}: {count} failed: {code}", style="red", highlight=False, soft_wrap=True)
        if limit := limit_of(row):
            console.print(f"{where}: {limit} had no CPU time left, which limits the figures", style="yellow")


def _peak(fleet: Mapping[str, Any]) -> str:
    size = FleetSize(fleet["verifiers"], fleet["coordinators"], fleet["drafters"])
    told = f"{size}: at most {fleet['tokens_per_s']:.0f} tokens/s, with {fleet['sessions']} sessions"
    if fleet["scaling"] is None or size.verifiers == 1:
        return told
    return f"{told}: {fleet['scaling']:.2f} × one verifier, {fleet['scaling'] / size.verifiers:.0%} of ideal"
