"""Calibration of a drafter's probabilities against the measured acceptance of its guesses.

A tree grows where its paths are likeliest. An underconfident drafter grows it too broad and shallow, an overconfident
one as a bare chain. Measured acceptance per rank among siblings corrects the probabilities.
"""

from __future__ import annotations

import math

from outrider.base.decayed_mean import DecayedMean

_RANKS = 4  # ranks from the last one upwards are counted together
_WEIGHT = 0.005  # of a measurement
_PRIOR_TRIALS = 12.0  # weight of the assumption that the drafter's probabilities are right
_MAX_LOGPROB = math.log(0.98)


class Calibration:
    """Acceptance statistics of one drafter for greedy or for sampled sessions, shared by all of them."""

    def __init__(self) -> None:
        self._accepted = [DecayedMean(_WEIGHT, 0.0, trials=0.0) for _ in range(_RANKS)]
        self._stated = [DecayedMean(_WEIGHT, 0.0, trials=0.0) for _ in range(_RANKS)]  # probability, by the drafter

    def record_proposed(self, rank: int, logprob: float) -> None:
        """Record the probability that the drafter stated for a guess of this rank."""
        self._stated[min(rank, _RANKS - 1)].add(math.exp(logprob))

    def record_outcome(self, siblings: int, accepted: int | None) -> None:
        """Record which of the sibling guesses was accepted, by rank; None if none was."""
        for rank in range(siblings):
            self._accepted[min(rank, _RANKS - 1)].add(float(accepted == rank))

    def score(self, rank: int, logprob: float) -> float:
        """Return the calibrated log-probability of a guess that the drafter gives `logprob`."""
        mean, rate = self._stated[min(rank, _RANKS - 1)], self._accepted[min(rank, _RANKS - 1)]
        if not mean.trials or not rate.trials:
            return logprob
        stated = max(1e-6, mean.value)
        measured = (rate.value * rate.trials + stated * _PRIOR_TRIALS) / (rate.trials + _PRIOR_TRIALS)
        return min(max(_MAX_LOGPROB, logprob), logprob + math.log(measured / stated))
