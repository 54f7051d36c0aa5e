"""The curves of `outrider bench engine` as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.bench.engine.results import BASE_CONTEXT, Alone


def draw(alone: Alone, file: Path) -> None:
    # A figure of its own, without pyplot: no display is looked for.
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _steps(left, alone)
    _throughput(right, alone)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # Below: inside, some machine's curve would run through it.
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    where = alone.device if alone.device != "cpu" else f"{alone.threads} CPU threads"
    figure.suptitle(f"{alone.name}, weights in {alone.weights}, {alone.engine} on {where}")
    figure.savefig(file, dpi=150)


def _steps(axes: Axes, alone: Alone) -> None:
    for context in alone.contexts():
        counts = sorted(new for at, new in alone.verification if at == context)
        times = [alone.verification[context, new].least for new in counts]
        axes.plot(counts, times, marker="o", markersize=4, label=f"context {context:,}")
    axes.plot(1, alone.eager.least, "kx", markersize=8, label=f"transformers, {BASE_CONTEXT}")
    axes.axhline(alone.floor_ms, color="gray", linestyle="--", label="floor of one token")
    axes.set_xticks((1, 8, 16, 24, 32))
    axes.set_title("A step of one session")
    axes.set_xlabel("new tokens in the step")
    axes.set_ylabel("milliseconds, best round")


def _throughput(axes: Axes, alone: Alone) -> None:
    for context in alone.contexts():
        counts = sorted(sessions for at, sessions in alone.batch if at == context)
        rates = [alone.tokens_per_s(context, sessions) for sessions in counts]
        axes.plot(counts, rates, marker="o", markersize=4, label=f"context {context:,}")
    ticks = sorted({sessions for _, sessions in alone.batch})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_title("Plain steps of many sessions")
    axes.set_xlabel("sessions, one new token each")
    axes.set_ylabel("tokens per second, all together")
