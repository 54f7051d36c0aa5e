"""Plots of a run as SVG; the colours come from the CSS of the report."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from loadtest.report.summary import Percentiles, Summary

# Placeholder colours for matplotlib; the SVG gets CSS variables, so that one plot fits the light and dark modes.
_NAMES = ("ink", "soft", "line", "band", "one", "two", "three", "warn", "bad")
_BY_NAME = {name: "#" + 3 * f"{number:02}" for number, name in enumerate(_NAMES, start=1)}
_SIZE = (5.2, 2.3)  # inches; small, so that text stays readable on narrow pages
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.edgecolor": _BY_NAME["line"],
    "axes.labelcolor": _BY_NAME["soft"],
    "xtick.color": _BY_NAME["line"],
    "ytick.color": _BY_NAME["line"],
    "xtick.labelcolor": _BY_NAME["soft"],
    "ytick.labelcolor": _BY_NAME["soft"],
    "text.color": _BY_NAME["soft"],
}
_MINUTES_FROM_S = 240


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    legend: dict[str, str]  # by curve: its colour
    svg: str


@dataclass(frozen=True, slots=True)
class _Curve:
    name: str
    colour: str
    values: Sequence[float | None]


def plots(summary: Summary) -> list[Plot]:
    series = summary.series
    drawn = [
        _plot(summary, "Tokens per second", [_Curve("tokens/s", "one", series.tokens_per_s)], filled=True),
        _plot(summary, "Users", [_Curve("users", "one", series.users)], filled=True),
        _plot(summary, "First token, milliseconds", _percentiles(series.first_token_ms)),
        _plot(summary, "Inter-token, milliseconds", _percentiles(series.inter_token_ms)),
    ]
    if summary.all.shed or summary.all.failures:
        trouble = [_Curve("shed", "warn", series.shed_per_s), _Curve("failed", "bad", series.failures_per_s)]
        drawn.append(_plot(summary, "Shed and failed per second", trouble))
    return drawn


def _percentiles(values: Sequence[Percentiles]) -> list[_Curve]:
    return [
        _Curve("p99", "three", [value.p99 for value in values]),
        _Curve("p95", "two", [value.p95 for value in values]),
        _Curve("p50", "one", [value.p50 for value in values]),
    ]


def _plot(summary: Summary, title: str, curves: Sequence[_Curve], *, filled: bool = False) -> Plot:
    unit = 60 if summary.series.at_s and summary.series.at_s[-1] >= _MINUTES_FROM_S else 1
    at = [(since + summary.series.step_s / 2) / unit for since in summary.series.at_s]
    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": title}):
        # Without pyplot, matplotlib needs no display.
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        _bands(axes, summary, unit)
        for curve in curves:
            values = [math.nan if value is None else value for value in curve.values]
            # With few requests, p99 often equals p95: the wider curve stays visible behind it.
            width = 3.0 if curve.name == "p99" else 1.5
            axes.plot(at, values, color=_BY_NAME[curve.colour], linewidth=width, marker=".", markersize=2 * width)
            if filled:
                axes.fill_between(at, values, color=_BY_NAME[curve.colour], alpha=0.18, linewidth=0)
        _style_axes(axes, "minutes" if unit > 1 else "seconds")
        axes.set_xlim(0, (at[-1] if at else 0) + summary.series.step_s / 2 / unit)
        svg = _svg(figure)
    legend = {curve.name: curve.colour for curve in curves} if len(curves) > 1 else {}
    return Plot(title, legend, svg)


def _bands(axes: Axes, summary: Summary, unit: int) -> None:
    """Draw the parts of the run; between them, the number of users changes."""
    for number, part in enumerate(summary.parts):
        began, ended = part.began_s / unit, (part.began_s + part.seconds) / unit
        if number % 2 == 0:
            axes.axvspan(began, ended, color=_BY_NAME["band"], linewidth=0)
        if len(summary.parts) > 1:
            axes.text(
                (began + ended) / 2,
                1.02,
                part.name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=8,
            )


def _style_axes(axes: Axes, x: str) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=_BY_NAME["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def _svg(figure: Figure) -> str:
    """Return the SVG element alone, without a fixed size."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for name, colour in _BY_NAME.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg
