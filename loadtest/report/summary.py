"""Summary of a run: computed from its record, saved as JSON, shown by `python -m loadtest` and its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from loadtest.prompts import KINDS
from loadtest.report.record import Histogram, Recorder, RequestGroup, RequestTally, merge_all
from loadtest.shapes import ShapeSpan
from loadtest.workload import PROTOCOLS, TEXT_DIFFERS

NO_REQUESTS = "no request completed"
RECOVERED = 0.5  # required fraction of the throughput before a peak; low, since small machines are noisy
_MAX_STEPS = 150  # of a plot
_MIN_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Target and load of a run."""

    began: float
    target: str
    endpoints: list[str]
    load: dict[str, Any]


class Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Percentiles(Figures):
    """Percentiles in milliseconds; None without measurements."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, spread: Histogram) -> Percentiles:
        return cls(p50=spread.percentile(0.5), p95=spread.percentile(0.95), p99=spread.percentile(0.99))


class Counts(Figures):
    requests: int
    failures: int
    shed: int
    compared: int
    tokens: int
    checked_steps: int  # steps that had guesses to check
    guesses: int
    accepted: int
    first_token_ms: Percentiles
    inter_token_ms: Percentiles
    total_ms: Percentiles

    @property
    def acceptance_length(self) -> float | None:
        """Return the mean number of tokens of a step with guesses, as `vllm bench serve` reports it."""
        return 1 + self.accepted / self.checked_steps if self.checked_steps else None

    @classmethod
    def of(cls, tally: RequestTally, **more: Any) -> Any:
        return cls(
            requests=tally.requests,
            failures=tally.failures,
            shed=tally.shed,
            compared=tally.compared,
            tokens=tally.tokens,
            checked_steps=tally.checked_steps,
            guesses=tally.guesses,
            accepted=tally.accepted,
            first_token_ms=Percentiles.of(tally.first_token),
            inter_token_ms=Percentiles.of(tally.inter_token),
            total_ms=Percentiles.of(tally.total),
            **more,
        )


class SortFigures(Counts):
    """Figures of one protocol, and of one kind of prompt or of all (empty)."""

    protocol: str
    kind: str


class PartFigures(Counts):
    """Figures of a part, while all of its users were running."""

    name: str
    users: int
    began_s: float  # since the start of the run
    seconds: float
    tokens_per_s: float


class Series(Figures):
    """Measurements over time, in steps of `step_s` seconds."""

    step_s: float
    at_s: list[float]
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
    seconds: float  # measured: all users of a part were running
    tokens_per_s: float  # in these seconds
    recovery: float | None  # throughput of the last part / first part, if both have the same number of users
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
        """Return why the run failed; empty if it passed."""
        if self.errors:
            return ", ".join(f"{count} × {error}" for error, count in sorted(self.errors.items()))
        if not self.all.compared:
            return NO_REQUESTS
        if self.recovery is not None and self.recovery < RECOVERED:
            return f"throughput recovered to {self.recovery:.0%} only"
        return ""

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.to_json())

    @staticmethod
    def load_from(path: Path) -> Summary:
        return Summary.model_validate_json(path.read_text())


def summarise(recorder: Recorder, spans: Sequence[ShapeSpan], run: LoadRun) -> Summary:
    total = merge_all(tally for _, _, tally in recorder.tallies)
    parts = [_part(recorder, span, run.began) for span in spans]
    seconds = sum(part.seconds for part in parts)
    return Summary(
        version=version("outrider"),
        began=datetime.fromtimestamp(run.began, UTC).isoformat(timespec="seconds"),
        target=run.target,
        endpoints=run.endpoints,
        load=run.load,
        seconds=seconds,
        tokens_per_s=sum(part.tokens_per_s * part.seconds for part in parts) / seconds if seconds else 0.0,
        recovery=_recovery(parts, spans),
        errors=dict(total.errors),
        all=Counts.of(total),
        sorts=_sorts(recorder),
        parts=parts,
        series=_series(recorder, spans, run.began),
    )


def _sorts(recorder: Recorder) -> list[SortFigures]:
    by_group: dict[RequestGroup, list[RequestTally]] = {}
    for _, group, tally in recorder.tallies:
        by_group.setdefault(group, []).append(tally)
    found: list[SortFigures] = []
    for protocol in PROTOCOLS:
        kinds = {
            kind: merge_all(by_group[group]) for kind in KINDS if (group := RequestGroup(protocol, kind)) in by_group
        }
        found += [SortFigures.of(tally, protocol=protocol, kind=kind) for kind, tally in kinds.items()]
        if kinds:
            found.append(SortFigures.of(merge_all(kinds.values()), protocol=protocol, kind=""))
    return found


def _part(recorder: Recorder, span: ShapeSpan, start: float) -> PartFigures:
    """Return a part's figures; tokens of partial slices count in proportion, other counts only in whole slices."""
    within = RequestTally()
    tokens = 0.0
    for number, _, tally in recorder.tallies:
        since, until = number * recorder.slice_s, (number + 1) * recorder.slice_s
        tokens += tally.tokens * max(0.0, min(until, span.ended) - max(since, span.began)) / recorder.slice_s
        if span.began <= since and until <= span.ended:
            within.merge(tally)
    figures: PartFigures = PartFigures.of(
        within,
        name=span.part.name,
        users=span.part.users,
        began_s=span.began - start,
        seconds=span.seconds,
        tokens_per_s=tokens / span.seconds if span.seconds else 0.0,
    )
    return figures


def _recovery(parts: Sequence[PartFigures], spans: Sequence[ShapeSpan]) -> float | None:
    """Return the recovery; None where the last part was interrupted: its outputs on their way do not count yet."""
    if len(parts) < 3 or parts[0].users != parts[-1].users or not parts[0].tokens_per_s:
        return None
    if spans[-1].seconds < spans[-1].part.seconds:
        return None
    return parts[-1].tokens_per_s / parts[0].tokens_per_s


def _series(recorder: Recorder, spans: Sequence[ShapeSpan], start: float) -> Series:
    first = math.floor(start / recorder.slice_s)
    ends = [math.ceil(span.ended / recorder.slice_s) - 1 for span in spans]
    last = max([first, *ends, *recorder.users, *(number for number, _, _ in recorder.tallies)])
    wide = max(math.ceil(_MIN_STEP_S / recorder.slice_s), math.ceil((last + 1 - first) / _MAX_STEPS))
    at = range(first, last + 1, wide)
    steps: dict[int, RequestTally] = {since: RequestTally() for since in at}
    for number, _, tally in recorder.tallies:
        steps[max(first, number - (number - first) % wide)].merge(tally)
    step_s = wide * recorder.slice_s
    counted = steps.values()
    return Series(
        step_s=step_s,
        at_s=[(since - first) * recorder.slice_s for since in at],
        users=_users(recorder, at),
        tokens_per_s=[tally.tokens / step_s for tally in counted],
        shed_per_s=[tally.shed / step_s for tally in counted],
        failures_per_s=[tally.failures / step_s for tally in counted],
        first_token_ms=[Percentiles.of(tally.first_token) for tally in counted],
        inter_token_ms=[Percentiles.of(tally.inter_token) for tally in counted],
    )


def _users(recorder: Recorder, at: range) -> list[int]:
    """Return the last known number of users per step; a busy leading process may skip slices."""
    found, last = [], 0
    for since in at:
        seen = [recorder.users[number] for number in range(since, since + at.step) if number in recorder.users]
        last = seen[-1] if seen else last
        found.append(last)
    return found
