"""How far a drafter's own numbers can be believed: where it says a half, four in five may hold.

Trees grow where paths are likeliest. A drafter that doubts itself more than it
need grows them broad and shallow, one too sure of itself as bare chains; so
its shares are held against what became of its guesses, rank by rank.
"""

from __future__ import annotations

import math

_RANKS = 4  # further siblings count as the last of these
_DECAY = 0.995
_PRIOR_TRIALS = 12.0  # that its own numbers are right
_CERTAIN = math.log(0.98)


class Calibration:
    """Of one drafter for one manner of drawing. All sessions share what they learn."""

    def __init__(self) -> None:
        self._held = [0.0] * _RANKS
        self._trials = [0.0] * _RANKS
        self._said = [0.0] * _RANKS  # sum of the shares that were said, with
        self._offers = [0.0] * _RANKS  # their number

    def offered(self, rank: int, logprob: float) -> None:
        rank = min(rank, _RANKS - 1)
        self._said[rank] = self._said[rank] * _DECAY + math.exp(logprob)
        self._offers[rank] = self._offers[rank] * _DECAY + 1.0

    def judged(self, siblings: int, held: int | None) -> None:
        """A place with so many guesses came true, by which of them or by none."""
        for rank in range(min(siblings, _RANKS)):
            self._trials[rank] = self._trials[rank] * _DECAY + 1.0
            self._held[rank] = self._held[rank] * _DECAY + (1.0 if held == rank else 0.0)

    def score(self, rank: int, logprob: float) -> float:
        """Logarithm of the probability to hold, of a guess that the drafter gives this share."""
        rank = min(rank, _RANKS - 1)
        if not self._offers[rank] or not self._trials[rank]:
            return logprob
        said = max(1e-6, self._said[rank] / self._offers[rank])
        held = (self._held[rank] + said * _PRIOR_TRIALS) / (self._trials[rank] + _PRIOR_TRIALS)
        return min(max(_CERTAIN, logprob), logprob + math.log(held / said))
