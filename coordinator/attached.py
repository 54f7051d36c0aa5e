"""One drafter while it works for a session."""

from __future__ import annotations

from coordinator.gamma import Pair
from coordinator.hops import DrafterHop
from coordinator.plans import Plan
from coordinator.roster import Link
from outrider.errors import InvalidRequest
from outrider.messages import Features, SourceTally
from outrider.tree import depth
from outrider.v1 import common_pb2 as common

MAX_UNANSWERED = 192  # messages of guesses between two commits: no honest drafter has so much to say


class Attached:
    """`joined` once it has opened the session: until then it hears of commits and is not counted on."""

    def __init__(self, hop: DrafterHop, source: int, pair: Pair, plan: Plan) -> None:
        self.source = source
        self.pair = pair
        self.plan = plan
        self.joined = False
        self.wants_features = False
        self._unanswered = 0  # guesses since the last commit
        self.passed: common.Guess | None = None  # the newest message that said: nothing to guess here
        self._hop = hop

    @property
    def link(self) -> Link:
        return self._hop.link

    def guessed(self, guess: common.Guess) -> None:
        """Raises InvalidRequest for a flood: it would take time from others that share this coordinator."""
        self._unanswered += 1
        if self._unanswered > MAX_UNANSWERED:
            raise InvalidRequest.of("guesses", self._unanswered, f"at most {MAX_UNANSWERED} between two commits")
        self.pair.drafted(depth(guess.parents, len(guess.tokens)), guess.draft_us, tree=self.plan.branches > 1)
        if not guess.tokens:
            self.passed = guess

    def judged(self, tally: SourceTally | None, *, awaited: bool) -> None:
        """`awaited`: the verifier waited, and no drafter had anything."""
        if tally is not None:
            self.pair.judged(tally.offered, tally.accepted, due=self.plan.gamma > 0)
        else:
            self.pair.judged(0, 0, due=self.plan.gamma > 0 and awaited)

    def committed(self, position: int, tokens: tuple[int, ...], features: Features | None) -> int:
        """Tell it; how many bytes of hidden states went along."""
        self._unanswered = 0
        if not (self.joined and self.wants_features):
            features = None
        self._hop.committed(position, tokens, features)
        return len(features.rows) if features is not None else 0

    def steer(self, plan: Plan) -> None:
        if plan.for_drafter() != self.plan.for_drafter():
            self._hop.steer(plan.for_drafter())
        self.plan = plan

    def hang_up(self) -> None:
        self._hop.hang_up()
