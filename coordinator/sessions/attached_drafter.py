"""One drafter while it works for a session."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.control.estimator import PairEstimate
from coordinator.control.throughput_model import OPEN_NODES, SpeculationPlan
from coordinator.sessions.streams import DrafterStream
from coordinator.workers.worker_pool import WorkerConnection
from outrider.protocol import message_limits
from outrider.protocol.errors import InvalidRequest, OutriderError, ProtocolViolation
from outrider.protocol.speculation import HiddenStates, SourceTally
from outrider.speculation.tree_shape import TreeShape
from outrider.v1 import common_pb2 as common

MAX_UNANSWERED = 192  # messages of guesses between two commits: no honest drafter has so much to say
# A commit can cost a drafter its whole tree, which it then makes anew: so much may be sent for each.
_TOKENS_PER_COMMIT = 2 * OPEN_NODES
_BYTES_PER_COMMIT = 2 * message_limits.MAX_GUESS_BYTES
_JITTER_US = 2_000  # two messages may arrive closer together than they were sent
_COMMITS_KEPT = 16  # a link that hung brings the guesses for several commits at once
_MOST_TOKENS = _COMMITS_KEPT * _TOKENS_PER_COMMIT
_MOST_BYTES = _COMMITS_KEPT * _BYTES_PER_COMMIT


@dataclass(slots=True)
class Allowance:
    """What a drafter may still send. Every commit adds to it; what is not used is kept, up to a limit.

    Counting only what comes between two commits would let a drafter send as
    much with every one of them.
    """

    messages: int = MAX_UNANSWERED
    tokens: int = _MOST_TOKENS
    num_bytes: int = _MOST_BYTES

    def committed(self) -> None:
        self.messages = MAX_UNANSWERED
        self.tokens = min(_MOST_TOKENS, self.tokens + _TOKENS_PER_COMMIT)
        self.num_bytes = min(_MOST_BYTES, self.num_bytes + _BYTES_PER_COMMIT)

    def spend(self, guess: common.Guess) -> None:
        """Raises InvalidRequest for more than any honest drafter has to say."""
        self.messages -= 1
        self.tokens -= len(guess.tokens)
        self.num_bytes -= guess.ByteSize()
        if self.messages < 0:
            raise InvalidRequest.of("guesses", MAX_UNANSWERED + 1, f"at most {MAX_UNANSWERED} between two commits")
        if self.tokens < 0 or self.num_bytes < 0:
            raise InvalidRequest.of(
                "guesses",
                f"more than {_COMMITS_KEPT} commits' worth",
                f"at most {_TOKENS_PER_COMMIT} tokens and {_BYTES_PER_COMMIT} bytes per commit",
            )


class DraftPace:
    """How long a drafter can have worked on a message, by our own clock: what it says of that is not believed beyond.

    In turns it begins when it hears what is committed; ahead it never stops.
    """

    def __init__(self, now: float) -> None:
        self._asked_at = now
        self._answered_at = now

    def asked(self, now: float) -> None:
        self._asked_at = now

    def believed_us(self, draft_us: int, now: float, *, ahead: bool) -> int:
        since = self._answered_at if ahead else max(self._answered_at, self._asked_at)
        self._answered_at = now
        return min(draft_us, int((now - since) * 1e6) + _JITTER_US)


class AttachedDrafter:
    """`joined` once it has opened the session: until then it hears of commits and is not counted on."""

    def __init__(self, hop: DrafterStream, source: int, pair: PairEstimate, plan: SpeculationPlan, now: float) -> None:
        self.source = source
        self.pair = pair
        self.plan = plan
        self.joined = False
        self.wants_features = False
        self._allowance = Allowance()
        self._pace = DraftPace(now)
        self.passed: common.Guess | None = None  # the newest message that said: nothing to guess here
        self._hop = hop

    @property
    def link(self) -> WorkerConnection:
        return self._hop.link

    def guessed(self, guess: common.Guess, now: float) -> None:
        """Raises ProtocolViolation for what no honest drafter sends: it would take time from others here."""
        try:
            message_limits.check_guess(guess)
            self._allowance.spend(guess)
        except InvalidRequest as error:
            raise ProtocolViolation(error.message) from error
        guess.draft_us = self._pace.believed_us(guess.draft_us, now, ahead=self.plan.ahead)
        shape = TreeShape.of([parent - 1 for parent in guess.parents], len(guess.tokens))
        self.pair.observe_draft(shape.depth, guess.draft_us, tree=self.plan.branches > 1)
        if not guess.tokens:
            self.passed = guess

    def judged(self, tally: SourceTally | None, *, awaited: bool) -> None:
        """`awaited`: the verifier waited, and no drafter had anything."""
        if tally is not None:
            self.pair.observe_verdict(tally.offered, tally.accepted, due=self.plan.gamma > 0)
        else:
            self.pair.observe_verdict(0, 0, due=self.plan.gamma > 0 and awaited)

    def committed(self, position: int, tokens: tuple[int, ...], features: HiddenStates | None, now: float) -> int:
        """Tell it; how many bytes of hidden states went along."""
        self._allowance.committed()
        self._pace.asked(now)
        if not (self.joined and self.wants_features):
            features = None
        self._hop.committed(position, tokens, features)
        return len(features.rows) if features is not None else 0

    def steer(self, plan: SpeculationPlan, now: float) -> None:
        if plan.for_drafter() != self.plan.for_drafter():
            self._pace.asked(now)
            self._hop.steer(plan.for_drafter())
        self.plan = plan

    def hang_up(self, error: OutriderError) -> None:
        self._hop.hang_up(error)
