"""Drafter selection, pure: the one with the most accepted tokens guesses, and those that come near it do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.speculation import SourceTally

SMOOTHING = 0.1
PROBE_SMOOTHING = 0.4  # of a benched drafter: its results are rare and recent, so each weighs more
LEAD = 1.1  # factor of accepted tokens per step by which another drafter becomes the best
BENCH_BELOW = 0.5  # share of the best drafter's accepted length below which a drafter is benched
RETURN_ABOVE = 0.6  # the share from which on it returns; higher, so that it does not alternate
TRIAL_STEPS = 6  # steps with its own guesses before a drafter may be benched
PROBE_EVERY = 32  # steps on the bench between two probes
PROBE_POOR_STEPS = 2  # steps with poor guesses that end a probe
PROBE_MAX_STEPS = 8


@dataclass(slots=True)
class _Standing:
    """Measured results of one drafter."""

    length: DecayedMean  # accepted tokens per step that checked its guesses
    per_step: DecayedMean  # accepted tokens per step of any kind: many short guesses may beat a rare long one
    trials: int = 0
    benched: bool = False
    since: int = 0  # steps since it was benched or probed
    probe: int = 0  # poor steps left until the probe ends; 0: no probe

    def observe(self, tally: SourceTally | None) -> None:
        weight = PROBE_SMOOTHING if self.benched else SMOOTHING
        if tally is not None:
            self.per_step.add(tally.accepted, weight)
            self.length.add(tally.accepted, weight)
            self.trials += 1
        elif not self.benched or self.probe:
            self.per_step.add(0, weight)

    def compare(self, best_length: float, tally: SourceTally | None) -> None:
        """Bench or return the drafter by the best one's accepted length; between the two bounds nothing changes."""
        if self.benched and self.length.value >= RETURN_ABOVE * best_length:
            self.benched, self.probe = False, 0
        elif not self.benched and self.trials >= TRIAL_STEPS and self.length.value < BENCH_BELOW * best_length:
            self.benched, self.probe, self.since = True, 0, 0
        elif self.benched:
            self._advance_probe(poor=tally is not None and tally.accepted < RETURN_ABOVE * best_length)

    def _advance_probe(self, *, poor: bool) -> None:
        self.since += 1
        if self.probe:
            self.probe -= poor
            if not self.probe or self.since == PROBE_MAX_STEPS:
                self.probe = self.since = 0
        elif self.since == PROBE_EVERY:
            self.probe, self.since = PROBE_POOR_STEPS, 0


class DrafterSelection:
    """Standings of a session's drafters, by source."""

    def __init__(self) -> None:
        self._standings: dict[int, _Standing] = {}
        self.best: int | None = None

    def add(self, source: int, accepted_tokens: float, proposal_rate: float) -> None:
        """Add an attached drafter with the results expected of it."""
        per_step = DecayedMean(SMOOTHING, accepted_tokens * proposal_rate)
        self._standings[source] = _Standing(DecayedMean(SMOOTHING, accepted_tokens), per_step)
        self._find_best()

    def remove(self, source: int) -> None:
        self._standings.pop(source, None)
        self._find_best()

    def observe(self, tallies: Iterable[SourceTally]) -> None:
        """Record the tallies of a verdict that was made while guesses were allowed."""
        by_source = {tally.source: tally for tally in tallies}
        for source, standing in self._standings.items():
            standing.observe(by_source.get(source))
        self._find_best()
        for source, standing in self._standings.items():
            if self.best is not None and source != self.best:
                standing.compare(self._standings[self.best].length.value, by_source.get(source))

    def gammas(self, gamma: int) -> dict[int, int]:
        """Return γ of each drafter: the session's, or 0 on the bench."""
        return {source: 0 if one.benched and not one.probe else gamma for source, one in self._standings.items()}

    def _find_best(self) -> None:
        """Keep the best drafter unless another one is clearly better."""
        rates = {source: standing.per_step.value for source, standing in self._standings.items()}
        if self.best not in rates:
            self.best = None
        leader = max(rates, key=rates.__getitem__, default=None)
        if leader is not None and (self.best is None or rates[leader] > LEAD * rates[self.best]):
            self.best = leader
            self._standings[leader].benched = False
