"""Cost curve: the time of an engine step by its number of tokens."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Step time by tokens: linear between the points, then with the last slope; without points unknown."""

    rows: tuple[int, ...] = ()  # tokens of a step; the name is the contract's
    ms: tuple[float, ...] = ()

    @classmethod
    def line(cls, first_ms: float, token_ms: float) -> CostCurve:
        """Return the curve of a first token and equally expensive further ones."""
        return cls((1, 2), (first_ms, first_ms + token_ms))

    def at(self, tokens: float) -> float:
        if len(self.rows) < 2 or tokens <= self.rows[0]:
            return self.ms[0]
        after = min(bisect.bisect_left(self.rows, tokens), len(self.rows) - 1)
        before = after - 1
        slope = (self.ms[after] - self.ms[before]) / (self.rows[after] - self.rows[before])
        return self.ms[before] + slope * (tokens - self.rows[before])

    def tokens_within(self, ms: float, most: int) -> int:
        """Return the largest number of tokens, up to `most`, that a step computes in this time."""
        return bisect.bisect_right(range(1, most + 1), ms, key=self.at)

    def scaled(self, factor: float) -> CostCurve:
        return replace(self, ms=tuple(ms * factor for ms in self.ms))


UNKNOWN_COST = CostCurve()
