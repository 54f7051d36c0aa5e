"""`outrider bench network`: what a drafter far away brings over links of every length, and whether control knows."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.bench.common.remote_pair import Answers, Paces, RemoteSetup, ToyPair, far, make_pair
from outrider.bench.common.report import Row, check_files, needs, write_json
from outrider.cli import options
from outrider.client.sync import Finished, Tokens
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.statistics import GenerationStats
from outrider.testing.link_emulator import LinkShape

PLAIN, ADAPTIVE = "plain", "adaptive"
_PROMPT = tuple(range(40, 72))
GAMMA = 16
_BRANCHES = 3
_WARM_TOKENS = 64
_TOLERANCE = 0.1
_PREDICTED_TOKENS = 1024  # of every case
_PROBE_BYTES = 240  # both ways
_FIRST = 64  # tokens in which a session finds its way
_FEW_RTTS = (15.0, 80.0)  # of all drafters but the first
_DRIFT = ((15.0, 0.0), (80.0, 0.6), (5.0, 0.0), (40.0, 0.6))  # round trips, and noise on what the drafter says


@dataclass(frozen=True, slots=True)
class NetworkMode:
    """What a request asks for; nothing is fixed where it is adaptive."""

    name: str
    gamma: int | None = None
    ahead: bool | None = None
    branches: int | None = None

    @property
    def wishes(self) -> dict[str, Any]:
        given = {"gamma": self.gamma, "ahead": self.ahead, "branches": self.branches}
        return {name: value for name, value in given.items() if value is not None}


def modes(gammas: Sequence[int]) -> list[NetworkMode]:
    return [
        NetworkMode(PLAIN, 0),
        *(NetworkMode(f"in turns, γ {gamma}", gamma, ahead=False, branches=1) for gamma in gammas),
        NetworkMode("chain ahead", GAMMA, ahead=True, branches=1),
        NetworkMode("tree ahead", GAMMA, ahead=True, branches=_BRANCHES),
        NetworkMode(ADAPTIVE),
    ]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of link."""

    rtt_ms: float
    jitter_ms: float = 0.0
    kib_per_s: float = 0.0
    drafter: str = ""  # none but the first are named

    @property
    def shape(self) -> LinkShape:
        return LinkShape(self.rtt_ms / 2, self.jitter_ms, 1024 * self.kib_per_s)

    @property
    def probe_ms(self) -> float:
        """What a look at the drafter takes on average."""
        narrow = 1000 * _PROBE_BYTES / (1024 * self.kib_per_s) if self.kib_per_s else 0.0
        return self.rtt_ms + self.jitter_ms + narrow

    @property
    def label(self) -> str:
        text = f"{self.rtt_ms:g} ms"
        if self.jitter_ms:
            text += f", jitter {self.jitter_ms:g} ms"
        text += f", {self.kib_per_s:g} KiB/s" if self.kib_per_s else ""
        return text + (f", drafter {self.drafter}" if self.drafter else "")


@dataclass(frozen=True, slots=True)
class RemoteDrafter:
    """A drafter to try: how often its first guess is to hold, and what a step takes."""

    acceptance: float
    draft_ms: float

    @property
    def label(self) -> str:
        return f"{self.acceptance:g}, {self.draft_ms:g} ms"


@dataclass(frozen=True, slots=True)
class NetworkRun:
    """One answer."""

    tokens: tuple[int, ...]
    gaps_ms: tuple[float, ...]  # between tokens; those of one message come together
    stats: GenerationStats


@dataclass(slots=True)
class NetworkRuns:
    """The answers of one mode over one link."""

    runs: list[NetworkRun] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.stats.tokens_per_second for run in self.runs)

    @property
    def step_ms(self) -> float:
        """From step to step."""
        return 1000.0 * self.tokens_per_step / self.tokens_per_s

    @property
    def tokens_per_step(self) -> float:
        return sum(len(run.tokens) for run in self.runs) / sum(run.stats.steps for run in self.runs)

    @property
    def first_tokens_per_s(self) -> float:
        """Of the first tokens after the very first."""
        return statistics.median(1000 * _FIRST / max(1e-6, sum(run.gaps_ms[:_FIRST])) for run in self.runs)

    def row(self) -> Row:
        stats = [run.stats for run in self.runs]
        gaps = sorted(gap for run in self.runs for gap in run.gaps_ms)
        duration = sum(each.duration_ms for each in stats)
        missed = sum(each.missed for each in stats)
        return {
            "tokens_per_s": self.tokens_per_s,
            "first_tokens_per_s": self.first_tokens_per_s,
            "itl_p50_ms": statistics.median(gaps),
            "itl_p99_ms": gaps[int(0.99 * (len(gaps) - 1))],
            "tokens_per_step": self.tokens_per_step,
            "acceptance_first": _ratio(
                sum(each.accepted_per_position[0] for each in stats if each.accepted_per_position),
                sum(each.offered_per_position[0] for each in stats if each.offered_per_position),
            ),
            "bytes_per_accepted_token": statistics.fmean(each.bytes_per_accepted_token for each in stats),
            "bytes_per_guess": statistics.fmean(each.bytes_per_guessed_token for each in stats),
            "missed_at_hand": _ratio(sum(each.missed_at_hand for each in stats), missed),
            "drafter_idle": max(0.0, 1.0 - sum(each.draft_ms for each in stats) / duration),
            "verifier_idle": _ratio(
                sum(each.mean_wait_ms for each in stats), sum(each.mean_wait_ms + each.mean_step_ms for each in stats)
            ),
            "plans": {share.plan: share.steps for each in stats for share in each.plans if share.steps},
        }


def network(
    quick: Annotated[bool, options.option("--quick", "Three links, one short answer per mode.")] = False,
    verify: Annotated[
        str, options.option("--verify-pace", "Milliseconds of a verifier's step by its tokens.")
    ] = "1:40,17:40,33:80",
    drafters: Annotated[
        str,
        options.option(
            "--drafters",
            "acceptance:ms of each drafter: how often its first guess is to hold, and its step. The first crosses "
            "every link, others those of 15 and 80 ms. Empty: 0.8:4,0.5:4,0.8:16, with --quick the first.",
        ),
    ] = "",
    tokens: Annotated[int, options.option("--tokens", "Length of an answer; 0: 192, with --quick 96.", min=0)] = 0,
    rounds: Annotated[int, options.option("--rounds", "Answers per mode and link; 0: 3, with --quick 1.", min=0)] = 0,
    rtts: Annotated[
        str,
        options.option(
            "--rtts", "Only these round trips in ms, by commas; 15~4: with jitter; 15@32: with KiB a second."
        ),
    ] = "",
    json_file: Annotated[Path | None, options.option("--json", "Write the results to this file.")] = None,
    plot_file: Annotated[Path | None, options.option("--plot", "Draw what was found, as a .png file.")] = None,
) -> None:
    """A drafter far away: every mode over every link, and whether control chooses the best.

    Real services and sockets. The models are tiny and answer no sooner than the paces say, so that the timing of a
    large pair can be studied on any machine; the link between coordinator and drafter is our own.
    """
    check_files(json_file, plot_file)
    _pace(verify)
    to_cross = parse_links(rtts) if rtts else cells(quick=quick)
    to_try = parse_drafters(drafters or ("0.8:4" if quick else "0.8:4,0.5:4,0.8:16"))
    tokens = tokens or (96 if quick else 192)
    rounds = rounds or (1 if quick else 3)
    console = Console()
    to_run = modes((4, 6) if quick else (2, 4, 6, 8))
    found = Found()
    worlds: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-pair-") as folder, _progress(console) as progress:
        task = progress.add_task("", total=None)

        def say(text: str) -> None:
            progress.update(task, description=text)

        for number, drafter in enumerate(to_try):
            say(f"making a pair of tiny models, first guesses {drafter.acceptance:g}")
            pair = make_pair(Path(folder) / str(number), drafter.acceptance, Answers(_PROMPT, rounds, tokens))
            paces = Paces(verify, drafter.draft_ms)
            worlds[drafter.label] = {"acceptance": pair.acceptance, "gain": pair.gain, "draft_ms": paces.draft_ms}
            if number == 0:
                first, first_paces = pair, paces
            with far(pair, paces) as running:
                bench = Bench(running, to_run, tokens, rounds, found)
                for cell in to_cross if number == 0 else few(to_cross):
                    bench.measure(replace(cell, drafter=drafter.label if number else ""), pair, paces, say)
        with far(first, replace(first_paces, blur=drift_blur(tokens))) as running:
            drift = Bench(running, to_run, tokens, rounds, found).drift(say)
        say("predicting the same in virtual time")
        predicted = predict(found.cases())
    summary = summarise(found.measured, predicted, drift, texts_equal=found.texts_equal)
    console.print(
        f"paced engines: verify {verify} (tokens:ms); drafters: how often first guesses hold, of the others "
        "how many have the truth among two runners-up, and a step's milliseconds"
    )
    for label, world in worlds.items():
        console.print(f"  {label}: {world['acceptance']:.2f}, {world['gain']:.2f}, {world['draft_ms']:g}")
    show(console, found.measured, predicted, summary)
    if json_file is not None:
        write_json(
            json_file, rows_of(found.measured, predicted), summary | {"drift": drift}, paced=worlds, verify=verify
        )
    if plot_file is not None:
        picture = needs("matplotlib", "bench", "outrider.bench.network.plot")
        picture.draw(found.measured, first, first_paces, plot_file)


def parse_drafters(text: str) -> list[RemoteDrafter]:
    """`0.8:4,0.5:16`: acceptance and milliseconds of each."""
    found = []
    for part in text.split(","):
        acceptance, _, draft_ms = part.partition(":")
        try:
            found.append(RemoteDrafter(float(acceptance), float(draft_ms)))
        except ValueError as error:
            raise InvalidRequest.of("--drafters", text, "acceptance:ms, separated by commas") from error
        if not (0.05 <= found[-1].acceptance <= 0.99 and 0.0 <= found[-1].draft_ms <= 10_000.0):
            raise InvalidRequest.of("--drafters", part, "acceptance in [0.05, 0.99], ms in [0, 10000]")
    return found


_LINK = re.compile(r"(?P<rtt>[0-9.]+)(~(?P<jitter>[0-9.]+))?(@(?P<kib>[0-9.]+))?")
_FARTHEST_MS = 10_000.0


def parse_links(text: str) -> list[Cell]:
    """`15`, with jitter `15~4`, with so many KiB a second `15@32`, both `15~4@32`; separated by commas."""
    found = []
    for part in text.split(","):
        link = _LINK.fullmatch(part.strip())
        try:
            if link is None:
                raise ValueError("no such form")
            found.append(Cell(float(link["rtt"]), float(link["jitter"] or 0), float(link["kib"] or 0)))
        except ValueError as error:
            raise InvalidRequest.of("--rtts", part, "ms, ms~jitter, ms@KiB/s or ms~jitter@KiB/s") from error
        if max(found[-1].rtt_ms, found[-1].jitter_ms) > _FARTHEST_MS:
            raise InvalidRequest.of("--rtts", part, f"at most {_FARTHEST_MS:g} ms")
    return found


def cells(*, quick: bool) -> list[Cell]:
    if quick:
        return [Cell(0.0), Cell(15.0), Cell(80.0)]
    lengths = [Cell(rtt) for rtt in (0.0, 5.0, 15.0, 40.0, 80.0, 150.0)]
    shaken = [Cell(rtt, jitter_ms=rtt / 4) for rtt in (15.0, 80.0)]
    narrow = [Cell(rtt, kib_per_s=32.0) for rtt in (15.0, 80.0)]
    return [*lengths, *shaken, *narrow]


def few(cells: Sequence[Cell]) -> list[Cell]:
    """The links for all drafters but the first."""
    return [cell for cell in cells if cell in [Cell(rtt) for rtt in _FEW_RTTS]] or list(cells[:1])


def drift_blur(part: int) -> str:
    """The drafter of a run in which the link and its guesses change from part to part."""
    starts = [len(_PROMPT) + part * number for number in range(len(_DRIFT))]
    return ",".join(f"{start}:{amount:g}" for start, (_, amount) in zip(starts, _DRIFT, strict=True))


Measured = dict[Cell, dict[NetworkMode, NetworkRuns]]


@dataclass(slots=True)
class Found:
    """What all drafters showed."""

    measured: Measured = field(default_factory=dict)
    worlds: dict[Cell, dict[str, Any]] = field(default_factory=dict)  # as the simulator takes them
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by seed: nothing may change them
    texts_equal: bool = True

    def heard(self, seed: int, tokens: tuple[int, ...]) -> None:
        self.texts_equal &= self.texts.setdefault(seed, tokens) == tokens

    def cases(self) -> dict[tuple[Cell, NetworkMode], dict[str, Any]]:
        """What the simulator is to predict: all but narrow links. What the services add to a step and to a round is
        read off the shortest link."""
        overhead = self._overhead_ms()
        return {
            (cell, mode): {
                "world": {**self.worlds[cell], "cost": self._cost(), "overhead_ms": overhead},
                "wishes": mode.wishes,
                "tokens": _PREDICTED_TOKENS,
                "warm": _WARM_TOKENS,
                "gamma_max": GAMMA,
            }
            for cell, found in self.measured.items()
            if not cell.kib_per_s
            for mode in found
        }

    def _shortest(self) -> Cell:
        return min(self.measured, key=lambda cell: cell.rtt_ms)

    def _cost(self) -> tuple[list[int], list[float]]:
        """The verifier's pace, and what a plain step took beyond it."""
        rows, paced = self.worlds[self._shortest()]["cost"]
        more = max(0.0, self._plain_ms() - paced[0])
        return rows, [ms + more for ms in paced]

    def _overhead_ms(self) -> float:
        """What a round in turns took beyond a plain step, the drafter's pace and the link."""
        shortest = self._shortest()
        mode, runs = next((m, r) for m, r in self.measured[shortest].items() if m.gamma and m.ahead is False)
        assert mode.gamma is not None
        known = self._plain_ms() + mode.gamma * float(self.worlds[shortest]["draft_ms"]) + shortest.rtt_ms
        return max(0.0, runs.step_ms - known)

    def _plain_ms(self) -> float:
        return next(runs.step_ms for mode, runs in self.measured[self._shortest()].items() if mode.name == PLAIN)


class Bench:
    """One drafter over links, with what is found going into `found`."""

    def __init__(
        self, running: RemoteSetup, to_run: Sequence[NetworkMode], tokens: int, rounds: int, found: Found
    ) -> None:
        self._far = running
        self._modes = to_run
        self._tokens = tokens
        self._rounds = rounds
        self._found = found

    def measure(self, cell: Cell, pair: ToyPair, paces: Paces, say: Callable[[str], None]) -> None:
        """All modes in turn, round by round."""
        self._far.network.become(cell.shape)
        self._far.settle(cell.probe_ms)
        found = {mode: NetworkRuns() for mode in self._modes}
        self._ask(NetworkMode(ADAPTIVE), seed=1_000, tokens=_WARM_TOKENS)
        for number in range(self._rounds):
            for mode, runs in found.items():
                say(f"{cell.label}: {mode.name}, answer {number + 1} of {self._rounds}")
                run = self._ask(mode, seed=number, tokens=self._tokens)
                runs.runs.append(run)
                self._found.heard(number, run.tokens)
        self._found.measured[cell] = found
        self._found.worlds[cell] = {
            "acceptance": pair.acceptance,
            "gain": pair.gain,
            "draft_ms": paces.draft_ms,
            "cost": curve(paces),
            "rtt_ms": cell.rtt_ms,
            "jitter_ms": cell.jitter_ms,
        }

    def drift(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Answers along which the link and the drafter's guesses change three times, in every mode: what each part
        took."""
        took: dict[str, list[list[float]]] = {mode.name: [] for mode in self._modes}
        self._follow_drift(NetworkMode(ADAPTIVE), seed=1_077)
        for number in range(self._rounds):
            for mode in self._modes:
                say(f"what changes on the way: {mode.name}, answer {number + 1} of {self._rounds}")
                took[mode.name].append(self._follow_drift(mode, seed=2_000 + number))
        parts = {name: [statistics.median(part) for part in zip(*runs, strict=True)] for name, runs in took.items()}
        fixed = {name: sum(found) for name, found in parts.items() if name != ADAPTIVE}
        best = min(fixed, key=fixed.__getitem__)
        spent = sum(parts[ADAPTIVE])
        ideal = sum(min(part) for part in zip(*(parts[name] for name in fixed), strict=True))
        return {
            "parts": [{"rtt_ms": rtt, "blur": blur} for rtt, blur in _DRIFT],
            "seconds": parts,
            "best_fixed": best,
            "regret": max(0.0, 1.0 - fixed[best] / spent),
            "regret_of_parts": max(0.0, 1.0 - ideal / spent),  # against the best fixed mode of every part
            "vs_plain": fixed[PLAIN] / spent,
        }

    def _follow_drift(self, mode: NetworkMode, *, seed: int) -> list[float]:
        self._far.network.become(Cell(_DRIFT[0][0]).shape)
        self._far.settle(_DRIFT[0][0])
        took: list[float] = []
        began = 0.0

        def heard(count: int) -> None:
            nonlocal began
            now = time.perf_counter()
            began = began or now
            if count >= self._tokens * (len(took) + 1):
                took.append(now - began)
                began = now
                if len(took) < len(_DRIFT):
                    self._far.network.become(Cell(_DRIFT[len(took)][0]).shape)

        run = self._ask(mode, seed=seed, tokens=self._tokens * len(_DRIFT), heard=heard)
        self._found.heard(seed, run.tokens)
        return took

    def _ask(
        self, mode: NetworkMode, *, seed: int, tokens: int, heard: Callable[[int], None] = lambda _: None
    ) -> NetworkRun:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
        said: list[int] = []
        gaps: list[float] = []
        last = 0.0
        for reply in self._far.client.generate(tokens=_PROMPT, params=params, **mode.wishes):
            now = time.perf_counter()
            if isinstance(reply, Tokens):
                if last:
                    gaps += [1000 * (now - last), *[0.0] * (len(reply.token_ids) - 1)]
                last = now
                said += reply.token_ids
                heard(len(said))
            elif isinstance(reply, Finished):
                return NetworkRun(tuple(said), tuple(gaps), reply.stats)
        raise AssertionError("a stream ends with Finished or raises")


def predict(cases: Mapping[tuple[Cell, NetworkMode], dict[str, Any]]) -> dict[tuple[Cell, NetworkMode], float]:
    return {key: found["tokens_per_s"] for key, found in zip(cases, simulate(list(cases.values())), strict=True)}


def simulate(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By the coordinator's own simulator, in a process of its own."""
    command = [sys.executable, "-m", "coordinator.control.simulation"]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def curve(paces: Paces) -> tuple[list[int], list[float]]:
    """A verifier's pace as the simulator takes it."""
    pace = _pace(paces.verify)
    return list(pace.rows), list(pace.ms)


def _pace(text: str) -> CostCurve:
    pace: CostCurve = needs("torch", "models", "outrider.engine.throttled").parse_pace(text)
    return pace


def summarise(
    measured: Measured,
    predicted: Mapping[tuple[Cell, NetworkMode], float],
    drift: Mapping[str, Any],
    *,
    texts_equal: bool,
) -> dict[str, Any]:
    speeds = {cell: {mode.name: runs.tokens_per_s for mode, runs in found.items()} for cell, found in measured.items()}
    shortest = min(measured, key=lambda cell: cell.rtt_ms)
    colocated = max(v for name, v in speeds[shortest].items() if name.startswith("in turns"))
    adaptive_vs_plain = {cell: found[ADAPTIVE] / found[PLAIN] for cell, found in speeds.items()}
    regret = {
        cell: 1.0 - found[ADAPTIVE] / max(v for name, v in found.items() if name != ADAPTIVE)
        for cell, found in speeds.items()
    }
    errors = [abs(value / measured[cell][mode].tokens_per_s - 1.0) for (cell, mode), value in predicted.items()]
    guesses = [run.stats for found in measured.values() for runs in found.values() for run in runs.runs]
    at = {cell.rtt_ms: cell for cell in measured if cell == Cell(cell.rtt_ms)}
    return {
        **{f"adaptive_vs_colocated_rtt{rtt:g}": speeds[cell][ADAPTIVE] / colocated for rtt, cell in sorted(at.items())},
        **{f"adaptive_vs_plain_rtt{rtt:g}": adaptive_vs_plain[cell] for rtt, cell in sorted(at.items())},
        "colocated_vs_plain": colocated / speeds[shortest][PLAIN],
        "worst_vs_plain": min(adaptive_vs_plain.values()),
        "worst_vs_plain_first64": min(_first(found) for found in measured.values()),
        "worst_regret": max(0.0, *regret.values()),
        "worst_regret_drift": drift["regret"],
        "predicted_within_10pct": sum(error <= _TOLERANCE for error in errors) / max(1, len(errors)),
        "bytes_per_guess": max((s.bytes_per_guessed_token for s in guesses if s.drafts), default=0.0),
        "texts_equal": texts_equal,
    }


def _first(found: Mapping[NetworkMode, NetworkRuns]) -> float:
    """The first tokens of adaptive answers, against plain ones."""
    by_name = {mode.name: runs.first_tokens_per_s for mode, runs in found.items()}
    return by_name[ADAPTIVE] / by_name[PLAIN]


def rows_of(measured: Measured, predicted: Mapping[tuple[Cell, NetworkMode], float]) -> list[Row]:
    return [
        {
            "rtt_ms": cell.rtt_ms,
            "jitter_ms": cell.jitter_ms,
            "kib_per_s": cell.kib_per_s,
            "drafter": cell.drafter,
            "mode": mode.name,
            **runs.row(),
            "predicted_tokens_per_s": predicted.get((cell, mode)),
        }
        for cell, found in measured.items()
        for mode, runs in found.items()
    ]


def show(
    console: Console,
    measured: Measured,
    predicted: Mapping[tuple[Cell, NetworkMode], float],
    summary: Mapping[str, Any],
) -> None:
    table = Table("link", *(mode.name for mode in next(iter(measured.values()))), title="times plain (predicted)")
    for cell, found in measured.items():
        plain = next(runs.tokens_per_s for mode, runs in found.items() if mode.name == PLAIN)
        texts = []
        for mode, runs in found.items():
            said = predicted.get((cell, mode))
            beside = f" ({said / plain:.2f})" if said is not None else ""
            texts.append(f"{runs.tokens_per_s / plain:.2f}{beside}")
        table.add_row(cell.label, *texts)
    console.print(table)
    for name, value in summary.items():
        console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    )
