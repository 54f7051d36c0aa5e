"""Decayed mean: the mean of measurements of which the latest count most."""

from __future__ import annotations


class DecayedMean:
    """Mean in which a measurement counts `weight` and everything before it the rest.

    `trials` is the number of measurements that the start value stands for. With a small one, the first measurements
    count more than `weight`. Without a start value, the first measurement becomes the mean.
    """

    __slots__ = ("known", "trials", "value", "weight")

    def __init__(self, weight: float, start: float | None = None, trials: float | None = None) -> None:
        self.weight = weight
        self.known = start is not None
        self.value = 0.0 if start is None else start
        self.trials = 1.0 / weight if trials is None else trials

    def add(self, measured: float, weight: float | None = None) -> None:
        """Add a measurement; `weight` is for a measurement that counts otherwise."""
        if not self.known:
            self.known, self.value = True, measured
            return
        self.trials = self.trials * (1.0 - self.weight) + 1.0
        self.value += (measured - self.value) * (1.0 / self.trials if weight is None else weight)
