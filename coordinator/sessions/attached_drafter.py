"""Attached drafter: one drafter while it works for a session."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.control.estimator import PairEstimate
from coordinator.control.throughput_model import OPEN_NODES, SpeculationPlan
from coordinator.sessions.streams import DrafterStream
from coordinator.workers.worker_connection import WorkerConnection
from outrider.protocol import message_limits
from outrider.protocol.errors import InvalidRequest, OutriderError, ProtocolViolation
from outrider.protocol.speculation import HiddenStates, SourceTally, TreeShape
from outrider.v1 import common_pb2 as common

MAX_UNANSWERED = 192  # messages of guesses between two commits; conforming drafters send fewer
# A commit can cost a drafter its whole tree, which it then drafts again. Each commit allows that much.
_TOKENS_PER_COMMIT = 2 * OPEN_NODES
_BYTES_PER_COMMIT = 2 * message_limits.MAX_GUESS_BYTES
_JITTER_US = 2_000  # two messages may arrive closer together than they were sent
_COMMITS_KEPT = 16  # a stalled network delivers the guesses for several commits at once
_MAX_TOKENS = _COMMITS_KEPT * _TOKENS_PER_COMMIT
_MAX_BYTES = _COMMITS_KEPT * _BYTES_PER_COMMIT


@dataclass(slots=True)
class Allowance:
    """Guesses that a drafter may still send. Each commit adds to it, up to a limit.

    A fixed limit per commit would allow a drafter to send it in full with
    every one of them.
    """

    messages: int = MAX_UNANSWERED
    tokens: int = _MAX_TOKENS
    num_bytes: int = _MAX_BYTES

    def add_commit(self) -> None:
        self.messages = MAX_UNANSWERED
        self.tokens = min(_MAX_TOKENS, self.tokens + _TOKENS_PER_COMMIT)
        self.num_bytes = min(_MAX_BYTES, self.num_bytes + _BYTES_PER_COMMIT)

    def spend(self, guess: common.Guess) -> None:
        """Raise InvalidRequest for more guesses than a conforming drafter sends."""
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


class DraftClock:
    """Upper bound of a drafter's reported drafting times, by the coordinator's clock.

    In turns, drafting begins with a commit or new steering. Ahead, it never stops.
    """

    def __init__(self, now: float) -> None:
        self._asked_at = now
        self._answered_at = now

    def ask(self, now: float) -> None:
        self._asked_at = now

    def bound_us(self, draft_us: int, now: float, *, ahead: bool) -> int:
        """Return the reported time, reduced to the time since the drafter could start."""
        since = self._answered_at if ahead else max(self._answered_at, self._asked_at)
        self._answered_at = now
        return min(draft_us, int((now - since) * 1e6) + _JITTER_US)


class AttachedDrafter:
    """A drafter of a session. It receives commits at once, and counts as `joined` after it has opened the session."""

    def __init__(
        self, stream: DrafterStream, source: int, pair: PairEstimate, plan: SpeculationPlan, now: float
    ) -> None:
        self.source = source
        self.pair = pair
        self.plan = plan
        self.joined = False
        self.wants_hidden_states = False
        self._allowance = Allowance()
        self._clock = DraftClock(now)
        self.passed: common.Guess | None = None  # the newest empty guess: nothing to propose at its position
        self._stream = stream

    @property
    def connection(self) -> WorkerConnection:
        return self._stream.connection

    def receive(self, guess: common.Guess, now: float) -> None:
        """Check a guess; raise ProtocolViolation for one that no conforming drafter sends."""
        try:
            message_limits.check_guess(guess)
            self._allowance.spend(guess)
        except InvalidRequest as error:
            raise ProtocolViolation(error.message) from error
        guess.draft_us = self._clock.bound_us(guess.draft_us, now, ahead=self.plan.ahead)
        shape = TreeShape.of([parent - 1 for parent in guess.parents], len(guess.tokens))
        self.pair.observe_draft(shape.depth, guess.draft_us, tree=self.plan.branches > 1)
        if not guess.tokens:
            self.passed = guess

    def observe(self, tally: SourceTally | None, *, awaited: bool) -> None:
        """Record a verdict; `awaited`: the verifier waited and no drafter had a guess."""
        if tally is not None:
            self.pair.observe_verdict(tally.proposed, tally.accepted, due=self.plan.gamma > 0)
        else:
            self.pair.observe_verdict(0, 0, due=self.plan.gamma > 0 and awaited)

    def commit(self, position: int, tokens: tuple[int, ...], hidden_states: HiddenStates | None, now: float) -> int:
        """Send committed tokens; return the number of bytes of hidden states sent with them."""
        self._allowance.add_commit()
        self._clock.ask(now)
        if not (self.joined and self.wants_hidden_states):
            hidden_states = None
        self._stream.commit(position, tokens, hidden_states)
        return len(hidden_states.rows) if hidden_states is not None else 0

    def steer(self, plan: SpeculationPlan, now: float) -> None:
        if plan.for_drafter() != self.plan.for_drafter():
            self._clock.ask(now)
            self._stream.steer(plan.for_drafter())
        self.plan = plan

    def cancel(self, error: OutriderError) -> None:
        self._stream.cancel(error)
