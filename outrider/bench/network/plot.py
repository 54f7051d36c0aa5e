"""Plot of `outrider bench network`: throughput by round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from outrider.bench.common.remote_pair import ThrottledTimes
from outrider.bench.network.cases import PLAIN, LinkCase
from outrider.bench.network.figures import Measured


def draw(measured: Measured, times: ThrottledTimes, file: Path) -> None:
    # Without pyplot, which looks for a display.
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    links = sorted((link for link in measured if link == LinkCase(link.rtt_ms)), key=lambda link: link.rtt_ms)
    for mode in measured[links[0]]:
        speedups = [
            measured[link][mode].tokens_per_s
            / next(r for m, r in measured[link].items() if m.name == PLAIN).tokens_per_s
            for link in links
        ]
        style: dict[str, Any] = {"linewidth": 2.5, "color": "black"} if mode.gamma is None else {}
        axes.plot([link.rtt_ms for link in links], speedups, marker="o", markersize=4, label=mode.name, **style)
    axes.set_title("Measured, through the real services", fontsize=11)
    axes.set_xlabel("round trip to the drafter, ms")
    axes.set_ylabel("times plain")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"Throttled engines: verify {times.verify} (tokens:ms), draft {times.draft_ms:g} ms a step")
    figure.savefig(file, dpi=130, bbox_inches="tight")
