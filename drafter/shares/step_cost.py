"""Measured time of a drafting step by its number of sessions: a line through the latest steps."""

from __future__ import annotations

from outrider.protocol.cost_curve import CostCurve

_KEPT = 0.995  # weight of older steps, per step: about the last 200 count
_SPREAD = 0.005  # least variance of the numbers of sessions, by their squared mean: one step in 50 of half the sessions
_OUTLIER = 3.0  # times the expected time: what exceeds it is another process of the machine
_LEAST_MS = 1e-3


class StepCost:
    """Times of drafting steps per level of guesses."""

    def __init__(self) -> None:
        self._weight = self._sessions = self._squares = self._ms = self._products = 0.0

    def add(self, sessions: int, level_ms: float) -> None:
        """Add a step of so many sessions that took `level_ms` for each level of guesses."""
        if (curve := self.curve) is not None:
            level_ms = min(level_ms, _OUTLIER * curve.at(sessions))
        self._weight = self._weight * _KEPT + 1.0
        self._sessions = self._sessions * _KEPT + sessions
        self._squares = self._squares * _KEPT + sessions**2
        self._ms = self._ms * _KEPT + level_ms
        self._products = self._products * _KEPT + sessions * level_ms

    @property
    def curve(self) -> CostCurve | None:
        """Return the line of least squares, which never falls; None until steps of several sizes were measured."""
        if not self._weight:
            return None
        mean, mean_ms = self._sessions / self._weight, self._ms / self._weight
        variance = self._squares / self._weight - mean**2
        if variance < _SPREAD * mean**2:
            return None
        slope = (self._products / self._weight - mean * mean_ms) / variance
        slope = min(max(0.0, slope), mean_ms / mean)
        return CostCurve.line(max(_LEAST_MS, mean_ms - slope * (mean - 1.0)), slope)
