"""`outrider bench capacity --fleet`: what fleets of several sizes, or one that runs, deliver to concurrent sessions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.base.processes import end_on_signals
from outrider.bench.common.progress import TurnProgress, turn_progress
from outrider.bench.common.report import Row, import_on_use, write_json
from outrider.bench.fleet import fleets
from outrider.bench.fleet.figures import load_row, summarise, with_scaling
from outrider.bench.fleet.fleets import FleetUnderLoad
from outrider.bench.fleet.load import check_answers, measure_load
from outrider.bench.fleet.options import FleetExtent, FleetSize
from outrider.bench.fleet.prompts import PromptMix, read_texts
from outrider.bench.fleet.table import line, show
from outrider.launch.services import read_assignments
from outrider.launch.stack import Stack

_TOY_SHARE = 0.25  # of a text: a token of toy models is a byte, one of others about four


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Fleets to measure in turn, each with how it starts."""

    fleets: Sequence[tuple[str, Callable[[], AbstractContextManager[FleetUnderLoad]]]]
    mix: PromptMix
    about: str
    where: dict[str, Any]  # for the report


def measure_fleets(flags: Mapping[str, Any]) -> None:
    """Measure every fleet under every number of sessions; keep what is done when interrupted, or when a fleet fails."""
    extent = FleetExtent.of(flags)
    texts = read_texts(flags["prompts"])
    end_on_signals()
    rows: list[Row] = []
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-pair-")))
        with turn_progress() as turns:
            plan = _plan(flags, extent, texts, folder, turns)
            exits.callback(_report, rows, plan, flags)
            total = len(plan.fleets) * len(extent.sessions)
            try:
                for row in _measure(plan, extent, total, turns):
                    rows.append(row)
                    turns.print(f"{len(rows)} of {total}: {line(row)}")
            except KeyboardInterrupt:
                if not rows:
                    raise
                turns.set_text(f"interrupted: the results are those of {len(rows)} of {total} measurements")


def _plan(
    flags: Mapping[str, Any], extent: FleetExtent, texts: list[str], folder: Path, turns: TurnProgress
) -> FleetPlan:
    mix = PromptMix(texts, extent.system_prompts, extent.tokens, extent.gamma, flags["model"])
    if flags["endpoint"]:
        fleet = fleets.running_fleet(flags)
        about = f"running fleet at {flags['endpoint']}"
        return FleetPlan([(str(fleet.size), lambda: nullcontext(fleet))], mix, about, {"endpoint": flags["endpoint"]})
    given = read_assignments(flags["settings"] or [])
    target = flags["target"]
    pace = flags["verify_pace"] or ("" if target else fleets.LARGE_MODEL)
    if pace:
        import_on_use("torch", "models", "outrider.engine.throttled").parse_pace(pace)
    if target:
        launch = fleets.target_plan(target, flags["drafter"], pace)
        about = f"target {target}" + (f", throttled: verify {pace} (tokens:ms)" if pace else "")
    else:
        turns.set_text("creating toy models")
        launch = fleets.toy_plan(folder, flags["acceptance"], pace)
        mix = replace(mix, share=_TOY_SHARE)
        about = f"toy models, throttled engines: verify {pace} (tokens:ms)"
    launch = fleets.with_room(launch, extent, given, toys=not target)
    fleets.check_settings(launch, extent)
    starts = [(str(n), partial(fleets.started_fleet, launch, n, partial(_show_start, turns, n))) for n in extent.sizes]
    return FleetPlan(starts, mix, about, {"target": target or "toy", "verify_pace": pace})


def _measure(plan: FleetPlan, extent: FleetExtent, total: int, turns: TurnProgress) -> Iterator[Row]:
    done = 0
    for name, start in plan.fleets:
        turns.set_text(f"{name}: starting")
        with start() as fleet:
            check_answers(fleet, plan.mix)
            for sessions in extent.sessions:
                text = f"{name}: {sessions} sessions"
                turns.set_text(text)
                turns.show(text, done, total)
                record = measure_load(fleet, plan.mix, sessions, extent.seconds)
                done += 1
                yield load_row(fleet.size, record)


def _show_start(turns: TurnProgress, size: FleetSize, running: Stack) -> None:
    waiting = [child.name for child in running.children if not child.ready.is_set()]
    turns.set_text(f"{size}: " + (f"starting {waiting[0]}" if waiting else "registering workers"))


def _report(rows: list[Row], plan: FleetPlan, flags: Mapping[str, Any]) -> None:
    if not rows:
        return
    scaled = with_scaling(rows)
    summary = summarise(rows)
    show(Console(), scaled, summary, plan.about)
    if flags["json_file"] is not None:
        write_json(flags["json_file"], scaled, summary, **plan.where)
    if flags["plot_file"] is not None:
        import_on_use("matplotlib", "bench", "outrider.bench.fleet.plot").draw(scaled, plan.about, flags["plot_file"])
