"""Console output of `outrider bench network`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.common.report import Row
from outrider.bench.network.cases import PLAIN
from outrider.bench.network.figures import Measured, Predicted


def show(
    console: Console,
    measured: Measured,
    predicted: Predicted,
    summary: Mapping[str, Any],
    worlds: Mapping[str, Row],
    verify: str,
) -> None:
    console.print(
        f"throttled engines: verify {verify} (tokens:ms); per drafter: acceptance of first guesses, share of the "
        "failed ones whose token is among two runners-up, milliseconds of a step"
    )
    for label, world in worlds.items():
        console.print(f"  {label}: {world['acceptance']:.2f}, {world['gain']:.2f}, {world['draft_ms']:g}")
    table = Table("link", *(mode.name for mode in next(iter(measured.values()))), title="times plain (predicted)")
    for link, by_mode in measured.items():
        plain = next(runs.tokens_per_s for mode, runs in by_mode.items() if mode.name == PLAIN)
        cells = []
        for mode, runs in by_mode.items():
            prediction = predicted.get((link, mode))
            suffix = f" ({prediction / plain:.2f})" if prediction is not None else ""
            cells.append(f"{runs.tokens_per_s / plain:.2f}{suffix}")
        table.add_row(link.label, *cells)
    console.print(table)
    for name, value in summary.items():
        console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
