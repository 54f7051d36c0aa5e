"""Which of a session's drafters may guess: the one that keeps being right, and those that come near it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.protocol.speculation import SourceTally

SMOOTHING = 0.1
PROBE_SMOOTHING = 0.4  # what a benched drafter shows is rare, and newer than what is known of it
LEAD = 1.1  # how many times as much another must bring to be the best
STAY = 0.5  # of the best one's accepted length, or it is benched
RETURN = 0.6  # of the same, to be let back
TRIAL = 6  # steps with guesses of its own before a drafter is judged
PROBE_EVERY = 32  # steps on the bench before it is looked at again
PROBE_GUESSES = 2  # steps with poor guesses that end such a look
PROBE_AT_MOST = 8  # steps that it takes at most


@dataclass(slots=True)
class _Standing:
    """How one drafter does."""

    length: float  # accepted tokens per step with guesses of its own
    brings: float  # the same per step at all: many short guesses may be worth more than a rare long one
    seen: int = 0
    benched: bool = False
    since: int = 0  # steps since it was benched or looked at
    probe: int = 0  # poor guesses still to be seen before a look ends; 0: there is none going on

    @property
    def plays(self) -> bool:
        return not self.benched or self.probe > 0

    def saw(self, tally: SourceTally | None) -> None:
        share = PROBE_SMOOTHING if self.benched else SMOOTHING
        accepted = tally.accepted if tally is not None else 0
        if self.plays or tally is not None:
            self.brings += share * (accepted - self.brings)
        if tally is not None:
            self.length += share * (accepted - self.length)
            self.seen += 1

    def compare(self, best: float, tally: SourceTally | None) -> None:
        """With the best one's accepted length. Between the two bounds everything stays as it is."""
        if self.benched and self.length >= RETURN * best:
            self.benched, self.probe = False, 0
        elif not self.benched and self.seen >= TRIAL and self.length < STAY * best:
            self.benched, self.probe, self.since = True, 0, 0
        elif self.benched:
            self._look(poor=tally is not None and tally.accepted < RETURN * best)

    def _look(self, *, poor: bool) -> None:
        """Now and then a benched drafter plays for a moment."""
        self.since += 1
        if self.probe:
            self.probe -= poor
            if not self.probe or self.since == PROBE_AT_MOST:
                self.probe = self.since = 0
        elif self.since == PROBE_EVERY:
            self.probe, self.since = PROBE_GUESSES, 0


class DrafterSelection:
    def __init__(self) -> None:
        self._standings: dict[int, _Standing] = {}
        self.best: int | None = None

    def join(self, source: int, length: float, offer_rate: float) -> None:
        """A drafter was attached; what to expect of it."""
        self._standings[source] = _Standing(length, length * offer_rate)
        self._find_best()

    def leave(self, source: int) -> None:
        self._standings.pop(source, None)
        self._find_best()

    def judged(self, tallies: Iterable[SourceTally]) -> None:
        """A verdict arrived, at a time when there was a γ to share."""
        shown = {tally.source: tally for tally in tallies}
        for source, standing in self._standings.items():
            standing.saw(shown.get(source))
        self._find_best()
        for source, standing in self._standings.items():
            if self.best is not None and source != self.best:
                standing.compare(self._standings[self.best].length, shown.get(source))

    def shares(self, gamma: int) -> dict[int, int]:
        """γ per drafter."""
        return {source: gamma if standing.plays else 0 for source, standing in self._standings.items()}

    def _find_best(self) -> None:
        """What stands, unless another brings clearly more."""
        if not self._standings:
            self.best = None
            return
        leader = max(self._standings, key=lambda source: self._standings[source].brings)
        held = self._standings.get(self.best) if self.best is not None else None
        if held is None or self._standings[leader].brings > LEAD * held.brings:
            self.best = leader
        assert self.best is not None
        self._standings[self.best].benched = False
