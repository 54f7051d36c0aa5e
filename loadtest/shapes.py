"""Number of users over time: the shapes as lists of parts, and the schedule of a run.

The time of a part begins when all of its users are running, so that every
measurement within it belongs to that number of users. Independent of locust.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocol.errors import InvalidRequest

SHAPES = ("steady", "ramp", "spike", "soak", "overload")
BEFORE, PEAK, AFTER = "before", "peak", "after"
MAX_SPAWN_RATE = 100.0  # users per second; locust warns above this
_STAIRS = 6
_QUARTERS = 4
_SURGE_S = 2.0  # duration of a change of users between two parts
_AROUND, _AT_PEAK = 0.35, 0.3  # fractions of the run: before and after the peak, at the peak


@dataclass(frozen=True, slots=True)
class ShapePart:
    """Part of a run with a constant number of users."""

    name: str
    users: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ShapeSpan:
    """Wall-clock time in which all users of a part were running."""

    part: ShapePart
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def parts(shape: str, users: int, seconds: float, times: float, capacity: int, max_users: int) -> list[ShapePart]:
    """Return the parts of a shape; `capacity` is the number of sessions that an overload multiplies."""
    made = _parts(shape, users, seconds, times, capacity)
    peak = max(part.users for part in made)
    if peak > max_users:
        raise InvalidRequest.of("users", peak, f"at most {max_users} at the peak; raise --max-users")
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


class ShapeSchedule:
    """Progress of a run through its parts. A part starts without all of its users after `grace_s`."""

    def __init__(self, parts: Sequence[ShapePart], spawn_rate: float, grace_s: float) -> None:
        self._parts = parts
        self._spawn_rate = min(spawn_rate, MAX_SPAWN_RATE)
        self._grace_s = grace_s
        self._at = 0
        self._rate = self._spawn_rate
        self._requested_at: float | None = None  # when this part's users were requested
        self._began: float | None = None
        self._spans: list[ShapeSpan] = []
        self._seen = 0.0

    def tick(self, now: float, users: int) -> tuple[int, float] | None:
        """Return the target number of users and the spawn rate; None once all users have stopped."""
        self._seen = now
        if self._requested_at is None:
            self._requested_at = now
        if self._at < len(self._parts):
            part = self._parts[self._at]
            if self._began is None and (users == part.users or now - self._requested_at > self._start_limit_s(part)):
                self._began = now
            if self._began is not None and now - self._began >= part.seconds:
                self._end_part(now, part)
        if self._at < len(self._parts):
            return self._parts[self._at].users, self._rate
        if users == 0 or now - self._requested_at > self._grace_s:
            return None
        return 0, MAX_SPAWN_RATE

    def spans(self) -> list[ShapeSpan]:
        """Return the spans of the completed parts and of the current one."""
        if self._began is None:
            return list(self._spans)
        return [*self._spans, ShapeSpan(self._parts[self._at], self._began, self._seen)]

    def _end_part(self, now: float, part: ShapePart) -> None:
        assert self._began is not None
        self._spans.append(ShapeSpan(part, self._began, now))
        self._at += 1
        if self._at < len(self._parts) and self._parts[self._at].users == part.users:
            self._began = now
            return
        self._requested_at, self._began = now, None
        if self._at < len(self._parts):
            change = abs(self._parts[self._at].users - part.users)
            self._rate = min(MAX_SPAWN_RATE, max(self._spawn_rate, change / _SURGE_S))

    def _start_limit_s(self, part: ShapePart) -> float:
        return self._grace_s + part.users / self._rate


def max_duration_s(parts: Sequence[ShapePart], spawn_rate: float, grace_s: float) -> float:
    """Return an upper bound on the duration of a run."""
    slowest = min(spawn_rate, MAX_SPAWN_RATE)
    return sum(part.seconds + grace_s + part.users / slowest + 1.0 for part in parts) + grace_s + 1.0
