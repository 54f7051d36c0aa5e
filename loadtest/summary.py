"""The figures of one run: made from its record, saved as JSON, shown by `python -m loadtest` and its page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from loadtest.asking import PROTOCOLS
from loadtest.attempt import TEXT_DIFFERS
from loadtest.prompts import KINDS
from loadtest.record import Recorder, Sort, Spread, Tally, whole
from loadtest.shapes import Span

NO_REQUESTS = "no request completed"
RECOVERED = 0.5  # of the throughput before a peak; wide, since small machines are noisy
_MOST_STEPS = 150  # that a picture can show


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked for."""

    began: float
    target: str
    endpoints: list[str]
    load: dict[str, Any]


class Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Percentiles(Figures):
    """Milliseconds; None where nothing was measured."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, spread: Spread) -> Percentiles:
        return cls(p50=spread.percentile(0.5), p95=spread.percentile(0.95), p99=spread.percentile(0.99))


class Counts(Figures):
    requests: int
    failures: int
    shed: int
    compared: int
    tokens: int
    first_token_ms: Percentiles
    inter_token_ms: Percentiles
    total_ms: Percentiles

    @classmethod
    def of(cls, tally: Tally, **more: Any) -> Any:
        return cls(
            requests=tally.requests,
            failures=tally.failures,
            shed=tally.shed,
            compared=tally.compared,
            tokens=tally.tokens,
            first_token_ms=Percentiles.of(tally.first_token),
            inter_token_ms=Percentiles.of(tally.inter_token),
            total_ms=Percentiles.of(tally.total),
            **more,
        )


class SortFigures(Counts):
    """Of one protocol, and of one kind of prompts or of all (empty)."""

    protocol: str
    kind: str


class PartFigures(Counts):
    """While all users of a part were there."""

    name: str
    users: int
    began_s: float  # since the run began
    seconds: float
    tokens_per_s: float


class Series(Figures):
    """Over time, in steps of so many seconds."""

    step_s: int
    at_s: list[int]
    users: list[int]
    tokens_per_s: list[float]
    shed_per_s: list[float]
    failures_per_s: list[float]
    first_token_ms: list[Percentiles]
    inter_token_ms: list[Percentiles]


class Summary(Figures):
    version: str
    began: str
    target: str
    endpoints: list[str]
    load: dict[str, Any]
    seconds: float  # measured: those in which all users of a part were there
    tokens_per_s: float  # in them
    recovery: float | None  # throughput of the last part over the first's, where both have the same users
    errors: dict[str, int]
    all: Counts
    sorts: list[SortFigures]
    parts: list[PartFigures]
    series: Series

    @property
    def different_texts(self) -> int:
        return self.errors.get(TEXT_DIFFERS, 0)

    @property
    def verdict(self) -> str:
        """Why this run does not pass; empty when it does."""
        if self.errors:
            return ", ".join(f"{count} × {error}" for error, count in sorted(self.errors.items()))
        if not self.all.compared:
            return NO_REQUESTS
        if self.recovery is not None and self.recovery < RECOVERED:
            return f"only {self.recovery:.0%} of the throughput came back"
        return ""

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.to_json())

    @staticmethod
    def load_from(path: Path) -> Summary:
        return Summary.model_validate_json(path.read_text())


def summarise(recorder: Recorder, spans: Sequence[Span], run: Run) -> Summary:
    tallies = recorder.tallies
    start = min([int(run.began), *recorder.users, *(second for second, _ in tallies)])
    all_of_it = whole(tallies.values())
    parts = [_part(recorder, span, start) for span in spans]
    seconds = sum(part.seconds for part in parts)
    return Summary(
        version=version("outrider"),
        began=datetime.fromtimestamp(run.began, UTC).isoformat(timespec="seconds"),
        target=run.target,
        endpoints=run.endpoints,
        load=run.load,
        seconds=seconds,
        tokens_per_s=sum(part.tokens_per_s * part.seconds for part in parts) / seconds if seconds else 0.0,
        recovery=_recovery(parts),
        errors=dict(all_of_it.errors),
        all=Counts.of(all_of_it),
        sorts=_sorts(tallies),
        parts=parts,
        series=_series(recorder, start, spans),
    )


def _sorts(tallies: dict[tuple[int, Sort], Tally]) -> list[SortFigures]:
    found = []
    for protocol in PROTOCOLS:
        kinds = {kind: [t for (_, sort), t in tallies.items() if sort == (protocol, kind)] for kind in KINDS}
        if not any(kinds.values()):
            continue
        found += [SortFigures.of(whole(of), protocol=protocol, kind=kind) for kind, of in kinds.items() if of]
        found.append(SortFigures.of(whole(t for of in kinds.values() for t in of), protocol=protocol, kind=""))
    return found


def _part(recorder: Recorder, span: Span, start: int) -> PartFigures:
    """Tokens of a second that is in the part with a piece only count with that piece."""
    tokens = sum(
        tally.tokens * max(0.0, min(second + 1, span.ended) - max(second, span.began))
        for (second, _), tally in recorder.tallies.items()
    )
    within = whole(tally for (second, _), tally in recorder.tallies.items() if span.began <= second + 0.5 < span.ended)
    figures: PartFigures = PartFigures.of(
        within,
        name=span.part.name,
        users=span.part.users,
        began_s=span.began - start,
        seconds=span.seconds,
        tokens_per_s=tokens / span.seconds if span.seconds else 0.0,
    )
    return figures


def _recovery(parts: Sequence[PartFigures]) -> float | None:
    if len(parts) < 3 or parts[0].users != parts[-1].users or not parts[0].tokens_per_s:
        return None
    return parts[-1].tokens_per_s / parts[0].tokens_per_s


def _series(recorder: Recorder, start: int, spans: Sequence[Span]) -> Series:
    ends = [math.ceil(span.ended) - 1 for span in spans]
    end = max([start, *ends, *recorder.users, *(second for second, _ in recorder.tallies)])
    step = max(1, math.ceil((end + 1 - start) / _MOST_STEPS))
    at = range(start, end + 1, step)
    steps: dict[int, list[Tally]] = {since: [] for since in at}
    for (second, _), tally in recorder.tallies.items():
        steps[second - (second - start) % step].append(tally)
    counted = [whole(tallies) for tallies in steps.values()]
    return Series(
        step_s=step,
        at_s=[since - start for since in at],
        users=_users(recorder, at, step),
        tokens_per_s=[tally.tokens / step for tally in counted],
        shed_per_s=[tally.shed / step for tally in counted],
        failures_per_s=[tally.failures / step for tally in counted],
        first_token_ms=[Percentiles.of(tally.first_token) for tally in counted],
        inter_token_ms=[Percentiles.of(tally.inter_token) for tally in counted],
    )


def _users(recorder: Recorder, at: Iterable[int], step: int) -> list[int]:
    """As last seen in each step: a leader that was busy has not looked in every second."""
    found, last = [], 0
    for since in at:
        last = next((recorder.users[s] for s in range(since + step - 1, since - 1, -1) if s in recorder.users), last)
        found.append(last)
    return found
