"""Plot of `outrider bench capacity --fleet`: throughput and the longest waits by concurrent sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from outrider.bench.common.report import Row
from outrider.bench.fleet.figures import size_of

_PANELS = (
    ("tokens_per_s", "Throughput", "tokens per second of all sessions"),
    ("between_tokens_p99_ms", "Between tokens", "milliseconds, p99"),
    ("first_token_p99_ms", "First token", "milliseconds, p99"),
)


def draw(rows: Sequence[Row], about: str, file: Path) -> None:
    # Without pyplot, which looks for a display.
    figure = Figure(figsize=(15, 5), layout="constrained")
    for axes, (key, title, label) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for size in dict.fromkeys(map(size_of, rows)):
            points = [(row["sessions"], row[key]) for row in rows if size_of(row) == size and row[key] is not None]
            style = ("-", "--", ":", "-.")[size.drafters % 4]
            axes.plot(
                *zip(*points, strict=True) if points else ([], []), style, marker="o", markersize=4, label=str(size)
            )
        axes.set_title(title)
        axes.set_xlabel("concurrent sessions")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    # Below the axes: inside, a curve could run through it.
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    figure.suptitle(about)
    figure.savefig(file, dpi=130)
