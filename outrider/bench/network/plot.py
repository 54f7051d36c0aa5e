"""Plot of `outrider bench network`: throughput by round trip, γ while the link changes, and the best mode by case."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from outrider.bench.common.remote_pair import ThrottledTimes, ToyPair
from outrider.bench.network.cases import GAMMA, PLAIN, LinkCase
from outrider.bench.network.figures import Measured
from outrider.bench.network.prediction import simulate, verifier_cost

_STEPS = ((15.0, 0.8), (80.0, 0.8), (80.0, 0.4), (5.0, 0.8))  # round trip in ms, acceptance of first guesses
_STEP_TOKENS = 200
_MEAN_OF = 12  # steps
_RTTS = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_ACCEPTANCES = (0.2, 0.4, 0.6, 0.8, 0.9)
_DRAFTS = (0.05, 0.25, 1.0)  # of a verifier's step
_MODES: tuple[tuple[str, str, list[dict[str, Any]]], ...] = (
    ("plain", "#bdbdbd", [{"gamma": 0}]),
    ("in turns", "#6baed6", [{"gamma": gamma} for gamma in (2, 4, 8)]),
    ("chain ahead", "#74c476", [{"gamma": GAMMA, "ahead": True, "branches": 1}]),
    ("tree ahead", "#fd8d3c", [{"gamma": GAMMA, "ahead": True, "branches": 3}]),
)


def draw(measured: Measured, pair: ToyPair, times: ThrottledTimes, file: Path) -> None:
    # Without pyplot, which looks for a display.
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    top, bottom = halves
    left, right = top.subplots(1, 2)
    _speed(left, measured)
    _change(right, pair, times)
    maps = bottom.subplots(1, len(_DRAFTS), sharey=True)
    for axes, share in zip(maps, _DRAFTS, strict=True):
        _map(axes, share)
    maps[0].set_ylabel("acceptance of first guesses")
    maps[len(maps) // 2].legend(
        handles=[Patch(color=colour, label=name) for name, colour, _ in _MODES],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=len(_MODES),
        frameon=False,
    )
    figure.suptitle(f"Throttled engines: verify {times.verify} (tokens:ms), draft {times.draft_ms:g} ms a step")
    figure.savefig(file, dpi=130, bbox_inches="tight")


def _speed(axes: Axes, measured: Measured) -> None:
    links = sorted((link for link in measured if link == LinkCase(link.rtt_ms)), key=lambda link: link.rtt_ms)
    for mode in next(iter(measured.values())):
        speedups = [
            measured[link][mode].tokens_per_s
            / next(r for m, r in measured[link].items() if m.name == PLAIN).tokens_per_s
            for link in links
        ]
        style: dict[str, Any] = {"linewidth": 2.5, "color": "black"} if mode.gamma is None else {}
        axes.plot([link.rtt_ms for link in links], speedups, marker="o", markersize=4, label=mode.name, **style)
    _label(axes, "Measured, through the real services", "round trip to the drafter, ms", "times plain")
    axes.set_ylim(bottom=0)


def _change(axes: Axes, pair: ToyPair, times: ThrottledTimes) -> None:
    """Plot the plan of γ control, and the length of checked paths, while link and acceptance change."""
    world = {"gain": pair.gain, "draft_ms": times.draft_ms, "cost": verifier_cost(times)}
    parts = [{**world, "rtt_ms": rtt, "acceptance": acceptance} for rtt, acceptance in _STEPS]
    (reply,) = simulate([{"worlds": parts, "tokens": _STEP_TOKENS, "seeds": 1}])
    began = 0.0
    for number, ((rtt, acceptance), ends) in enumerate(zip(_STEPS, reply["ends_ms"], strict=True)):
        axes.axvspan(began, ends / 1000, alpha=0.12, color=("#6baed6", "#fd8d3c")[number % 2])
        axes.text(
            (began + ends / 1000) / 2, 11.6, f"{rtt:g} ms\nacceptance {acceptance:g}", ha="center", va="top", fontsize=8
        )
        began = ends / 1000
    step_times, lengths = zip(*reply["offered"], strict=True)
    means = [statistics.fmean(lengths[max(0, i - _MEAN_OF + 1) : i + 1]) for i in range(len(lengths))]
    axes.plot(
        [ms / 1000 for ms in step_times], means, color="black", label=f"guesses on a path per step, mean of {_MEAN_OF}"
    )
    starts = [plan["ms"] for plan in reply["plans"]]
    for start, end, plan in zip(starts, [*starts[1:], reply["ends_ms"][-1]], reply["plans"], strict=True):
        colour = next(colour for name, colour, _ in _MODES if name == _mode(plan))
        axes.axvspan(start / 1000, end / 1000, ymax=0.06, color=colour)
    axes.set_ylim(-0.8, 12)
    _label(axes, "How far ahead while the link changes (virtual time)", "seconds; below: the plan", "γ in use")


def _mode(plan: Mapping[str, Any]) -> str:
    """Return the mode of the map to which a plan belongs."""
    if not plan["gamma"]:
        return "plain"
    if not plan["ahead"]:
        return "in turns"
    return "tree ahead" if plan["branches"] > 1 else "chain ahead"


def _map(axes: Axes, share: float) -> None:
    """Plot the fastest mode of each case, and its throughput over plain decoding."""
    verify_ms = 40.0
    cases = [
        {
            "world": {"acceptance": acceptance, "draft_ms": share * verify_ms, "rtt_ms": rtt},
            "wishes": options,
            "tokens": 300,
            "warm": 50,
            "seeds": 1,
        }
        for acceptance in _ACCEPTANCES
        for rtt in _RTTS
        for _, _, variants in _MODES
        for options in variants
    ]
    rates = iter([reply["tokens_per_s"] * verify_ms / 1000 for reply in simulate(cases)])
    winners: list[list[int]] = []
    for row, _ in enumerate(_ACCEPTANCES):
        winners.append([])
        for column, _ in enumerate(_RTTS):
            best = [max(next(rates) for _ in variants) for _, _, variants in _MODES]
            winners[-1].append(best.index(max(best)))
            axes.text(column, row, f"{max(best):.1f}", ha="center", va="center", fontsize=9)
    axes.imshow(
        winners, cmap=ListedColormap([colour for _, colour, _ in _MODES]), vmin=0, vmax=len(_MODES) - 1, origin="lower"
    )
    axes.set_xticks(range(len(_RTTS)), [f"{rtt / 40:g}" for rtt in _RTTS])
    axes.set_yticks(range(len(_ACCEPTANCES)), [f"{acceptance:g}" for acceptance in _ACCEPTANCES])
    axes.set_title(f"drafting a token takes {share:g} of a verifier's step", fontsize=10)
    axes.set_xlabel("round trip over a verifier's step")


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
