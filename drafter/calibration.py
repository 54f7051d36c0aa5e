"""Calibration of a drafter's probabilities against the measured acceptance of its guesses.

A tree grows where its paths are likeliest. An underconfident drafter grows it
too broad and shallow, an overconfident one as a bare chain. Measured
acceptance per rank among siblings corrects the probabilities.
"""

from __future__ import annotations

import math

_RANKS = 4  # ranks from the last one upwards are counted together
_DECAY = 0.995
_PRIOR_TRIALS = 12.0  # weight of the assumption that the drafter's probabilities are right
_MAX_LOGPROB = math.log(0.98)


class Calibration:
    """Acceptance statistics of one drafter for greedy or for sampled sessions, shared by all of them."""

    def __init__(self) -> None:
        self._accepted = [0.0] * _RANKS
        self._trials = [0.0] * _RANKS
        self._stated = [0.0] * _RANKS  # sum of the probabilities that the drafter stated
        self._proposed = [0.0] * _RANKS  # number of the probabilities in that sum

    def record_proposed(self, rank: int, logprob: float) -> None:
        """Record the probability that the drafter stated for a guess of this rank."""
        rank = min(rank, _RANKS - 1)
        self._stated[rank] = self._stated[rank] * _DECAY + math.exp(logprob)
        self._proposed[rank] = self._proposed[rank] * _DECAY + 1.0

    def record_outcome(self, siblings: int, accepted: int | None) -> None:
        """Record which of the sibling guesses was accepted, by rank; None if none was."""
        for rank in range(min(siblings, _RANKS)):
            self._trials[rank] = self._trials[rank] * _DECAY + 1.0
            self._accepted[rank] = self._accepted[rank] * _DECAY + (1.0 if accepted == rank else 0.0)

    def score(self, rank: int, logprob: float) -> float:
        """Return the calibrated log-probability of a guess that the drafter gives `logprob`."""
        rank = min(rank, _RANKS - 1)
        if not self._proposed[rank] or not self._trials[rank]:
            return logprob
        stated = max(1e-6, self._stated[rank] / self._proposed[rank])
        measured = (self._accepted[rank] + stated * _PRIOR_TRIALS) / (self._trials[rank] + _PRIOR_TRIALS)
        return min(max(_MAX_LOGPROB, logprob), logprob + math.log(measured / stated))
