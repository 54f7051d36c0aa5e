"""Plot of `outrider bench drafters`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outrider.bench.common.report import Row
from outrider.bench.drafters.comparison import OUTRIDER, sum_positions

_BARS = 0.8  # share of the width of a kind


def draw(rows: Sequence[Row], kinds: Sequence[str], drafters: Sequence[str], where: dict[str, Any], file: Path) -> None:
    """Plot the first mode's rows: the modes differ little, and the table has all of them."""
    shown = [row for row in rows if row["mode"] == rows[0]["mode"] and row["engine"] == OUTRIDER]
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _speedups(left, shown, kinds, drafters)
    _positions(right, shown, drafters)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25, axis="y")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4)
    figure.suptitle(f"{where['target']}, weights in {where['weights']}, on {where['device']}, {rows[0]['mode']}")
    figure.savefig(file, dpi=150)


def _speedups(axes: Axes, rows: Sequence[Row], kinds: Sequence[str], drafters: Sequence[str]) -> None:
    speedups = {(row["drafter"], row["kind"]): row["speedup_vs_plain"] or 0.0 for row in rows}
    width = _BARS / len(drafters)
    for i, name in enumerate(drafters):
        bars = [at + (i + 0.5) * width - _BARS / 2 for at in range(len(kinds))]
        axes.bar(bars, [speedups.get((name, kind), 0.0) for kind in kinds], width, label=name)
    axes.axhline(1.0, color="gray", linestyle="--", label="plain")
    axes.set_xticks(range(len(kinds)), list(kinds))
    axes.set_title("Tokens per second over plain, adaptive γ")
    axes.set_ylabel("times plain")


def _positions(axes: Axes, rows: Sequence[Row], drafters: Sequence[str]) -> None:
    """Plot acceptance by position over all kinds of prompts."""
    for name in drafters:
        own = [row for row in rows if row["drafter"] == name]
        proposed = sum_positions(row["offered_per_position"] for row in own)
        accepted = sum_positions(row["accepted_per_position"] for row in own)
        shares = [held / checked for held, checked in zip(accepted, proposed, strict=True) if checked]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=name)
    axes.set_ylim(top=1.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Acceptance by position")
    axes.set_xlabel("position in the guess")
    axes.set_ylabel("accepted share of checked guesses")
