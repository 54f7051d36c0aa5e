"""What `outrider bench network` found, as a picture: speed by distance, γ as the link changes, and who wins where."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from outrider.bench.common.remote_pair import Paces, ToyPair
from outrider.bench.network.command import GAMMA, PLAIN, Cell, Measured, curve, simulate

_STEPS = ((15.0, 0.8), (80.0, 0.8), (80.0, 0.4), (5.0, 0.8))  # round trips and first guesses as they change
_STEP_TOKENS = 200
_MEAN_OF = 12  # steps
_RTTS = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_ACCEPTANCES = (0.2, 0.4, 0.6, 0.8, 0.9)
_DRAFTS = (0.05, 0.25, 1.0)  # of a verifier's step
_WAYS: tuple[tuple[str, str, list[dict[str, Any]]], ...] = (
    ("plain", "#bdbdbd", [{"gamma": 0}]),
    ("in turns", "#6baed6", [{"gamma": gamma} for gamma in (2, 4, 8)]),
    ("chain ahead", "#74c476", [{"gamma": GAMMA, "ahead": True, "branches": 1}]),
    ("tree ahead", "#fd8d3c", [{"gamma": GAMMA, "ahead": True, "branches": 3}]),
)


def draw(measured: Measured, pair: ToyPair, paces: Paces, file: Path) -> None:
    # A figure of its own, without pyplot: no display is looked for.
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    top, bottom = halves
    left, right = top.subplots(1, 2)
    _speed(left, measured)
    _change(right, pair, paces)
    maps = bottom.subplots(1, len(_DRAFTS), sharey=True)
    for axes, share in zip(maps, _DRAFTS, strict=True):
        _map(axes, share)
    maps[0].set_ylabel("first guesses that hold")
    maps[len(maps) // 2].legend(
        handles=[Patch(color=colour, label=name) for name, colour, _ in _WAYS],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=len(_WAYS),
        frameon=False,
    )
    figure.suptitle(f"Paced engines: verify {paces.verify} (tokens:ms), draft {paces.draft_ms:g} ms a step")
    figure.savefig(file, dpi=130, bbox_inches="tight")


def _speed(axes: Axes, measured: Measured) -> None:
    cells = sorted((cell for cell in measured if cell == Cell(cell.rtt_ms)), key=lambda cell: cell.rtt_ms)
    for mode in measured[cells[0]]:
        times = [
            measured[cell][mode].tokens_per_s
            / next(r for m, r in measured[cell].items() if m.name == PLAIN).tokens_per_s
            for cell in cells
        ]
        strong: dict[str, Any] = {"linewidth": 2.5, "color": "black"} if mode.gamma is None else {}
        axes.plot([cell.rtt_ms for cell in cells], times, marker="o", markersize=4, label=mode.name, **strong)
    _plainly(axes, "Measured, through the real services", "round trip to the drafter, ms", "times plain")
    axes.set_ylim(bottom=0)


def _change(axes: Axes, pair: ToyPair, paces: Paces) -> None:
    """What control takes, and how long a path steps then check, through changes of the link and of the guesses."""
    world = {"gain": pair.gain, "draft_ms": paces.draft_ms, "cost": curve(paces)}
    parts = [{**world, "rtt_ms": rtt, "acceptance": acceptance} for rtt, acceptance in _STEPS]
    (found,) = simulate([{"worlds": parts, "tokens": _STEP_TOKENS, "seeds": 1}])
    began = 0.0
    for number, ((rtt, acceptance), ends) in enumerate(zip(_STEPS, found["ends_ms"], strict=True)):
        axes.axvspan(began, ends / 1000, alpha=0.12, color=("#6baed6", "#fd8d3c")[number % 2])
        axes.text(
            (began + ends / 1000) / 2, 11.6, f"{rtt:g} ms\nholds {acceptance:g}", ha="center", va="top", fontsize=8
        )
        began = ends / 1000
    times, lengths = zip(*found["offered"], strict=True)
    means = [statistics.fmean(lengths[max(0, i - _MEAN_OF + 1) : i + 1]) for i in range(len(lengths))]
    axes.plot([ms / 1000 for ms in times], means, color="black", label=f"guesses in a row per step, mean of {_MEAN_OF}")
    starts = [ms for ms, _, _ in found["plans"]]
    for start, end, (_, _, label) in zip(starts, [*starts[1:], found["ends_ms"][-1]], found["plans"], strict=True):
        colour = next(colour for name, colour, _ in _WAYS if name == _kind(label))
        axes.axvspan(start / 1000, end / 1000, ymax=0.06, color=colour)
    axes.set_ylim(-0.8, 12)
    _plainly(axes, "How far ahead while the link changes (virtual time)", "seconds; below: the plan", "γ in use")


def _kind(label: str) -> str:
    """The way that a plan's name speaks of, by the colours of the map."""
    if label == "plain":
        return "plain"
    if "ahead" not in label:
        return "in turns"
    return "tree ahead" if "×" in label else "chain ahead"


def _map(axes: Axes, share: float) -> None:
    """Who wins, and what that brings over plain."""
    verify_ms = 40.0
    cases = [
        {
            "world": {"acceptance": acceptance, "draft_ms": share * verify_ms, "rtt_ms": rtt},
            "wishes": wishes,
            "tokens": 300,
            "warm": 50,
            "seeds": 1,
        }
        for acceptance in _ACCEPTANCES
        for rtt in _RTTS
        for _, _, all_wishes in _WAYS
        for wishes in all_wishes
    ]
    rates = iter([found["tokens_per_s"] * verify_ms / 1000 for found in simulate(cases)])
    winners: list[list[int]] = []
    for row, _ in enumerate(_ACCEPTANCES):
        winners.append([])
        for column, _ in enumerate(_RTTS):
            best = [max(next(rates) for _ in all_wishes) for _, _, all_wishes in _WAYS]
            winners[-1].append(best.index(max(best)))
            axes.text(column, row, f"{max(best):.1f}", ha="center", va="center", fontsize=9)
    axes.imshow(
        winners, cmap=ListedColormap([colour for _, colour, _ in _WAYS]), vmin=0, vmax=len(_WAYS) - 1, origin="lower"
    )
    _ticks(axes)
    axes.set_title(f"drafting a token takes {share:g} of a verifier's step", fontsize=10)
    axes.set_xlabel("round trip over a verifier's step")


def _ticks(axes: Axes) -> None:
    axes.set_xticks(range(len(_RTTS)), [f"{rtt / 40:g}" for rtt in _RTTS])
    axes.set_yticks(range(len(_ACCEPTANCES)), [f"{acceptance:g}" for acceptance in _ACCEPTANCES])


def _plainly(axes: Axes, title: str, x: str, y: str, *, legend: bool = True) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=8)
