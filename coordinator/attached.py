"""One drafter while it works for a session."""

from __future__ import annotations

from coordinator.gamma import Pair
from coordinator.hops import DrafterHop
from coordinator.roster import Link
from outrider.messages import Features, SourceTally, Steering
from outrider.v1 import common_pb2 as common


class Attached:
    """`joined` once it has opened the session: until then it hears of commits and is not counted on."""

    def __init__(self, hop: DrafterHop, source: int, pair: Pair, gamma: int) -> None:
        self.source = source
        self.pair = pair
        self.gamma = gamma
        self.joined = False
        self.wants_features = False
        self.passed: common.Guess | None = None  # the newest message that said: nothing to guess here
        self._hop = hop

    @property
    def link(self) -> Link:
        return self._hop.link

    def guessed(self, guess: common.Guess) -> None:
        self.pair.drafted(depth(guess), guess.draft_us)
        if not guess.tokens:
            self.passed = guess

    def judged(self, tally: SourceTally | None, *, awaited: bool) -> None:
        """`awaited`: the verifier waited, and no drafter had anything."""
        if tally is not None:
            self.pair.judged(tally.offered, tally.accepted, due=self.gamma > 0)
        else:
            self.pair.judged(0, 0, due=self.gamma > 0 and awaited)

    def committed(self, position: int, tokens: tuple[int, ...], features: Features | None) -> int:
        """Tell it; how many bytes of hidden states went along."""
        if not (self.joined and self.wants_features):
            features = None
        self._hop.committed(position, tokens, features)
        return len(features.rows) if features is not None else 0

    def steer(self, gamma: int, branches: int | None) -> None:
        if gamma != self.gamma:
            self.gamma = gamma
            self._hop.steer(Steering(gamma=gamma, branches=branches))

    def hang_up(self) -> None:
        self._hop.hang_up()


def depth(guess: common.Guess) -> int:
    """Length of its longest path: what the drafter had to do one after the other."""
    if not guess.parents:
        return len(guess.tokens)
    depths = [0]
    for parent in guess.parents[: len(guess.tokens)]:
        depths.append(1 + depths[min(parent, len(depths) - 1)])
    return max(depths)
