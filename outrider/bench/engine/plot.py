"""Plot of `outrider bench engine`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.bench.engine.results import BASE_CONTEXT, PassTimes


def draw(passes: PassTimes, file: Path) -> None:
    # Without pyplot, which looks for a display.
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _steps(left, passes)
    _throughput(right, passes)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # Below the axes: inside, a curve could run through it.
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    where = passes.device if passes.device != "cpu" else f"{passes.threads} CPU threads"
    figure.suptitle(f"{passes.name}, weights in {passes.weights}, {passes.engine} on {where}")
    figure.savefig(file, dpi=150)


def _steps(axes: Axes, passes: PassTimes) -> None:
    for context in passes.contexts():
        counts = sorted(new for at, new in passes.verification if at == context)
        times = [passes.verification[context, new].best for new in counts]
        axes.plot(counts, times, marker="o", markersize=4, label=f"context {context:,}")
    axes.plot(1, passes.eager.best, "kx", markersize=8, label=f"transformers, {BASE_CONTEXT}")
    axes.axhline(passes.floor_ms, color="gray", linestyle="--", label="floor of one token")
    axes.set_xticks((1, 8, 16, 24, 32))
    axes.set_title("A step of one session")
    axes.set_xlabel("new tokens in the step")
    axes.set_ylabel("milliseconds, best round")


def _throughput(axes: Axes, passes: PassTimes) -> None:
    for context in passes.contexts():
        counts = sorted(sessions for at, sessions in passes.batch if at == context)
        rates = [passes.tokens_per_s(context, sessions) for sessions in counts]
        axes.plot(counts, rates, marker="o", markersize=4, label=f"context {context:,}")
    ticks = sorted({sessions for _, sessions in passes.batch})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_title("Plain steps of many sessions")
    axes.set_xlabel("sessions, one new token each")
    axes.set_ylabel("tokens per second of all sessions")
