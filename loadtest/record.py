"""What happened in every slice of a run: counted where the users are, merged by the process that leads.

A distributed run has users in many processes, so counts are kept, and times
as counts of narrow steps: both add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loadtest.attempt import Attempt

_STEP = math.log(1.02)
_LEAST_MS = 0.01
LEAST_SLICE_S = 0.25
_SLICES = 1000  # of a long run


class Spread:
    """Times of one sort in steps of 2 %: percentiles are exact to 1 %, however many there are."""

    __slots__ = ("_counts",)

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        self._counts = Counter(counts or {})

    def add(self, ms: float, count: int = 1) -> None:
        self._counts[round(math.log(max(ms, _LEAST_MS)) / _STEP)] += count

    def merge(self, other: Spread) -> None:
        self._counts.update(other._counts)

    def percentile(self, share: float) -> float | None:
        """The nearest rank; None without any."""
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
    """Of some slice of time or of many. Tokens are those of right answers, when they came."""

    requests: int = 0  # that ended, well or not
    shed: int = 0  # refusals, besides
    compared: int = 0
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_token: Spread = field(default_factory=Spread)
    inter_token: Spread = field(default_factory=Spread)
    total: Spread = field(default_factory=Spread)

    @property
    def failures(self) -> int:
        return self.errors.total()

    def merge(self, other: RequestTally) -> None:
        self.requests += other.requests
        self.shed += other.shed
        self.compared += other.compared
        self.tokens += other.tokens
        self.errors.update(other.errors)
        self.first_token.merge(other.first_token)
        self.inter_token.merge(other.inter_token)
        self.total.merge(other.total)

    def packed(self) -> list[Any]:
        counts = [self.requests, self.shed, self.compared, self.tokens, dict(self.errors)]
        return [*counts, self.first_token.packed(), self.inter_token.packed(), self.total.packed()]

    @classmethod
    def unpacked(cls, data: list[Any]) -> RequestTally:
        requests, shed, compared, tokens, errors, *spreads = data
        return cls(requests, shed, compared, tokens, Counter(errors), *map(Spread, spreads))


def whole(tallies: Iterable[RequestTally]) -> RequestTally:
    found = RequestTally()
    for tally in tallies:
        found.merge(tally)
    return found


class Sort(NamedTuple):
    """What requests are told apart by."""

    protocol: str
    kind: str


class Recorder:
    """`slice_s`: how long a slice is; all processes of a run have the same."""

    def __init__(self, slice_s: float = LEAST_SLICE_S) -> None:
        self.slice_s = slice_s
        self._tallies: dict[tuple[int, Sort], RequestTally] = {}
        self._users: dict[int, int] = {}

    @classmethod
    def of(cls, seconds: float) -> Recorder:
        """For a run of this length: the longest takes no more memory than another."""
        return cls(max(LEAST_SLICE_S, seconds / _SLICES))

    def add(self, attempt: Attempt) -> None:
        """Once it has ended."""
        sort = Sort(attempt.protocol, attempt.case.prompt.kind)

        def at(ms: float) -> RequestTally:
            return self._tallies.setdefault((self._slice(attempt.begun_at + ms / 1000), sort), RequestTally())

        end = at(attempt.total_ms)
        if attempt.shed:
            end.shed += 1
            return
        end.requests += 1
        end.compared += attempt.compared
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

    def see(self, now: float, users: int) -> None:
        self._users[self._slice(now)] = users

    def clear(self) -> None:
        self._tallies.clear()
        self._users.clear()

    @property
    def tallies(self) -> Iterator[tuple[int, Sort, RequestTally]]:
        for (number, sort), tally in self._tallies.items():
            yield number, sort, tally

    @property
    def users(self) -> dict[int, int]:
        """As last seen in each slice in which somebody looked."""
        return self._users

    def take(self) -> list[list[Any]]:
        """What has come since this was last asked, to be sent to whoever merges it."""
        taken = [[number, *sort, tally.packed()] for number, sort, tally in self.tallies]
        self._tallies.clear()
        return taken

    def merge(self, taken: list[list[Any]]) -> None:
        for number, protocol, kind, packed in taken:
            found = self._tallies.setdefault((number, Sort(protocol, kind)), RequestTally())
            found.merge(RequestTally.unpacked(packed))

    def _slice(self, when: float) -> int:
        return math.floor(when / self.slice_s)
