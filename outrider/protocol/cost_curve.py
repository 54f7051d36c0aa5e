"""How long an engine step takes by the number of its tokens."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CostCurve:
    """How long a step takes by the tokens that go through it: the line between two points, the last slope after them.

    Without points it is not known.
    """

    rows: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()

    @classmethod
    def line(cls, first_ms: float, token_ms: float) -> CostCurve:
        """So much for one token, so much for every further one."""
        return cls((1, 2), (first_ms, first_ms + token_ms))

    def at(self, tokens: float) -> float:
        if len(self.rows) < 2 or tokens <= self.rows[0]:
            return self.ms[0]
        after = min(bisect.bisect_left(self.rows, tokens), len(self.rows) - 1)
        before = after - 1
        slope = (self.ms[after] - self.ms[before]) / (self.rows[after] - self.rows[before])
        return self.ms[before] + slope * (tokens - self.rows[before])

    def tokens_within(self, ms: float, most: int) -> int:
        """The most tokens, up to `most`, that take no longer."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle) <= ms else (low, middle - 1)
        return low

    def scaled(self, factor: float) -> CostCurve:
        return replace(self, ms=tuple(ms * factor for ms in self.ms))


UNKNOWN_COST = CostCurve()
