"""How many users there are when: the shapes of a run as parts, and the course of a run through its parts.

Every part has an end, and its time begins when its users are there, so what is
measured within it is measured at that many users. Knows nothing of locust.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocol.errors import InvalidRequest

SHAPES = ("steady", "ramp", "spike", "soak", "overload")
BEFORE, PEAK, AFTER = "before", "peak", "after"
FASTEST = 100.0  # users per second: locust warns above it
_STAIRS = 6
_QUARTERS = 4
_SURGE_S = 2.0  # in which users come and go between two parts
_AROUND, _AT_PEAK = 0.35, 0.3  # shares of the time


@dataclass(frozen=True, slots=True)
class ShapePart:
    name: str
    users: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ShapeSpan:
    """When a part's users were all there, by the clock."""

    part: ShapePart
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def parts(shape: str, users: int, seconds: float, times: float, capacity: int, max_users: int) -> list[ShapePart]:
    """`capacity`: sessions that the fleet takes at once, of which an overload is a multiple."""
    made = _parts(shape, users, seconds, times, capacity)
    most = max(part.users for part in made)
    if most > max_users:
        raise InvalidRequest.of("users", most, f"at most {max_users} at the peak; --max-users is the bound")
    return made


def _parts(shape: str, users: int, seconds: float, times: float, capacity: int) -> list[ShapePart]:
    if shape == "steady":
        return [ShapePart("steady", users, seconds)]
    if shape == "ramp":
        stairs = sorted({math.ceil(users * (stair + 1) / _STAIRS) for stair in range(_STAIRS)})
        return [ShapePart(f"{stair} users", stair, seconds / len(stairs)) for stair in stairs]
    if shape == "soak":
        return [ShapePart(f"quarter {number + 1}", users, seconds / _QUARTERS) for number in range(_QUARTERS)]
    peak = math.ceil(times * (max(users, capacity) if shape == "overload" else users))
    return [
        ShapePart(BEFORE, users, _AROUND * seconds),
        ShapePart(PEAK, peak, _AT_PEAK * seconds),
        ShapePart(AFTER, users, _AROUND * seconds),
    ]


class Course:
    """Where a run is. `patience_s`: how long users may take to come or to finish before time runs without them."""

    def __init__(self, parts: Sequence[ShapePart], spawn_rate: float, patience_s: float) -> None:
        self._parts = parts
        self._spawn_rate = min(spawn_rate, FASTEST)
        self._patience_s = patience_s
        self._at = 0
        self._rate = self._spawn_rate
        self._asked: float | None = None  # since when this part's users are wanted
        self._began: float | None = None
        self._spans: list[ShapeSpan] = []
        self._seen = 0.0

    def tick(self, now: float, users: int) -> tuple[int, float] | None:
        """How many users there should be and how fast they come; None when the last one has gone."""
        self._seen = now
        if self._asked is None:
            self._asked = now
        if self._at < len(self._parts):
            part = self._parts[self._at]
            if self._began is None and (users == part.users or now - self._asked > self._allowed_s(part)):
                self._began = now
            if self._began is not None and now - self._began >= part.seconds:
                self._next(now, part)
        if self._at < len(self._parts):
            return self._parts[self._at].users, self._rate
        if users == 0 or now - self._asked > self._patience_s:
            return None
        return 0, FASTEST

    def spans(self) -> list[ShapeSpan]:
        """Those that are over, and what there is of the one that runs."""
        if self._began is None:
            return list(self._spans)
        return [*self._spans, ShapeSpan(self._parts[self._at], self._began, self._seen)]

    def _next(self, now: float, part: ShapePart) -> None:
        assert self._began is not None
        self._spans.append(ShapeSpan(part, self._began, now))
        self._at += 1
        if self._at < len(self._parts) and self._parts[self._at].users == part.users:
            self._began = now
            return
        self._asked, self._began = now, None
        if self._at < len(self._parts):
            change = abs(self._parts[self._at].users - part.users)
            self._rate = min(FASTEST, max(self._spawn_rate, change / _SURGE_S))

    def _allowed_s(self, part: ShapePart) -> float:
        return self._patience_s + part.users / self._rate


def longest_s(parts: Sequence[ShapePart], spawn_rate: float, patience_s: float) -> float:
    """No run takes longer."""
    slowest = min(spawn_rate, FASTEST)
    return sum(part.seconds + patience_s + part.users / slowest + 1.0 for part in parts) + patience_s + 1.0
