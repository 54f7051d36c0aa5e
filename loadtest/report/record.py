"""Record of a run: counts and times per time slice, kept by every process and merged by the leading one.

A distributed run has users in many processes, so times are stored as histograms, which can be merged like counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # it needs urllib3, which not every installation has
    from loadtest.attempt import Attempt

_STEP = math.log(1.02)
_MIN_MS = 0.01
MIN_SLICE_S = 0.25
_MAX_SLICES = 1000


class Histogram:
    """Histogram of times with bins of 2 %: percentiles are exact to 1 %, in bounded memory."""

    __slots__ = ("_counts",)

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        self._counts = Counter(counts or {})

    def add(self, ms: float, count: int = 1) -> None:
        self._counts[round(math.log(max(ms, _MIN_MS)) / _STEP)] += count

    def merge(self, other: Histogram) -> None:
        self._counts.update(other._counts)

    def percentile(self, share: float) -> float | None:
        """Return the percentile by nearest rank; None for an empty histogram."""
        left = math.ceil(share * self._counts.total())
        for step, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return math.exp(step * _STEP)
        return None

    def packed(self) -> dict[int, int]:
        return dict(self._counts)


@dataclass(slots=True)
class RequestTally:
    """Sums over one or more time slices. Tokens are those of correct outputs, counted on arrival."""

    requests: int = 0  # completed or failed
    shed: int = 0  # not in `requests`
    compared: int = 0
    tokens: int = 0
    checked_steps: int = 0  # steps of complete outputs that had guesses to check
    guesses: int = 0
    accepted: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    total: Histogram = field(default_factory=Histogram)

    @property
    def failures(self) -> int:
        return self.errors.total()

    def merge(self, other: RequestTally) -> None:
        self.requests += other.requests
        self.shed += other.shed
        self.compared += other.compared
        self.tokens += other.tokens
        self.checked_steps += other.checked_steps
        self.guesses += other.guesses
        self.accepted += other.accepted
        self.errors.update(other.errors)
        self.first_token.merge(other.first_token)
        self.inter_token.merge(other.inter_token)
        self.total.merge(other.total)

    def packed(self) -> list[Any]:
        counts = [self.requests, self.shed, self.compared, self.tokens]
        speculation = [self.checked_steps, self.guesses, self.accepted]
        times = [each.packed() for each in (self.first_token, self.inter_token, self.total)]
        return [*counts, *speculation, dict(self.errors), *times]

    @classmethod
    def unpacked(cls, data: list[Any]) -> RequestTally:
        requests, shed, compared, tokens, checked_steps, guesses, accepted, errors, *spreads = data
        counts = (requests, shed, compared, tokens, checked_steps, guesses, accepted)
        return cls(*counts, Counter(errors), *map(Histogram, spreads))


def merge_all(tallies: Iterable[RequestTally]) -> RequestTally:
    merged = RequestTally()
    for tally in tallies:
        merged.merge(tally)
    return merged


class RequestGroup(NamedTuple):
    """Protocol and kind of prompt, by which requests are grouped."""

    protocol: str
    kind: str


class Recorder:
    """Tallies by time slice and group. All processes of a run have the same slice duration."""

    def __init__(self, slice_s: float = MIN_SLICE_S) -> None:
        self.slice_s = slice_s
        self._tallies: dict[tuple[int, RequestGroup], RequestTally] = {}
        self.users: dict[int, int] = {}  # last recorded number, by slice with a record

    @classmethod
    def of(cls, seconds: float) -> Recorder:
        """Return a recorder for a run of this duration; longer runs have longer slices, not more memory."""
        return cls(max(MIN_SLICE_S, seconds / _MAX_SLICES))

    def add(self, attempt: Attempt) -> None:
        """Record a request that has ended."""
        group = RequestGroup(attempt.protocol, attempt.case.prompt.kind)

        def at(ms: float) -> RequestTally:
            return self._tallies.setdefault((self._slice(attempt.begun_at + ms / 1000), group), RequestTally())

        end = at(attempt.total_ms)
        if attempt.shed:
            end.shed += 1
            return
        end.requests += 1
        end.compared += attempt.compared
        speculation = attempt.speculation
        end.checked_steps += speculation.steps
        end.guesses += speculation.guesses
        end.accepted += speculation.accepted
        if attempt.first_token_ms is not None:
            at(attempt.first_token_ms).first_token.add(attempt.first_token_ms)
        for arrival, ms in attempt.gaps:
            at(arrival.at_ms).inter_token.add(ms, arrival.tokens)
        if attempt.error:
            end.errors[attempt.error] += 1
            return
        end.total.add(attempt.total_ms)
        for arrival in attempt.arrivals:
            at(arrival.at_ms).tokens += arrival.tokens

    def record_users(self, now: float, users: int) -> None:
        self.users[self._slice(now)] = users

    def clear(self) -> None:
        self._tallies.clear()
        self.users.clear()

    @property
    def tallies(self) -> Iterator[tuple[int, RequestGroup, RequestTally]]:
        for (number, group), tally in self._tallies.items():
            yield number, group, tally

    def drain(self) -> list[list[Any]]:
        """Return the counts since the last call, for the leading process to merge."""
        taken = [[number, *group, tally.packed()] for number, group, tally in self.tallies]
        self._tallies.clear()
        return taken

    def merge(self, taken: list[list[Any]]) -> None:
        for number, protocol, kind, packed in taken:
            found = self._tallies.setdefault((number, RequestGroup(protocol, kind)), RequestTally())
            found.merge(RequestTally.unpacked(packed))

    def _slice(self, when: float) -> int:
        return math.floor(when / self.slice_s)
