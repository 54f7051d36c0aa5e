"""States of earlier positions on their way to a drafter, piece by piece behind the first token.

For a drafter that reads the whole context, each verdict asks for one more piece while the session drafts. Nothing is
held here: a piece is checked against the request that it answers, and passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from coordinator.control.throughput_model import SpeculationPlan
from coordinator.sessions.hidden_states.session_states import SessionStates
from outrider.protocol.errors import InvalidRequest, ProtocolViolation
from outrider.protocol.hidden_states.earlier_states import MAX_EARLIER_POSITIONS, EarlierStates
from outrider.protocol.hidden_states.limits import check_rows
from outrider.protocol.hidden_states.messages import HiddenStates, StateSpec
from outrider.protocol.speculation import VerifySteering
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft

MAX_PIECE_BYTES = 1 << 20  # of a verifier's reply; a single row may be wide


@dataclass(frozen=True, slots=True)
class EarlierReply:
    """A verifier's reply to a request."""

    asked: EarlierStates
    states: common.HiddenStates
    count: int  # of positions


class EarlierProgress:
    """The positions that one drafter has yet to get."""

    def __init__(self, wanted: int) -> None:
        """Set how many positions before the first ones that it gets the drafter reads."""
        self.wanted = min(wanted, MAX_EARLIER_POSITIONS)
        self.asked: EarlierStates | None = None
        self._next = self._end = self._sent_to = 0
        self._begun = False

    def follow(self, sent: HiddenStates) -> HiddenStates:
        """Note states that go to the drafter with a commit, and return them. After a gap in these, it begins again."""
        if sent.position != self._sent_to:
            self._next, self._end, self._begun = max(0, sent.position - self.wanted), sent.position, False
        self._sent_to = sent.position + sent.count
        return sent

    def request(self, number: int) -> EarlierStates | None:
        """Return what to ask for next, unless a request is under way."""
        if self.asked is not None or self._next == self._end:
            return None
        self.asked = EarlierStates(number, self._next, self._end)
        return self.asked

    def take(self, reply: EarlierReply) -> bool:
        """Return whether a reply goes to the drafter: pieces have no gaps, and only the first may begin later."""
        if self.asked is not reply.asked:
            return False
        self.asked = None
        if (reply.asked.position, reply.asked.end) != (self._next, self._end):
            return False  # it began again meanwhile
        if not reply.count or (self._begun and reply.states.position != self._next):
            self._next = self._end  # not kept, or no longer
            return False
        self._next, self._begun = reply.states.position + reply.count, True
        return True


class Reader(Protocol):
    """A drafter's stream, as far as earlier states concern it."""

    earlier: EarlierProgress
    plan: SpeculationPlan
    spec: StateSpec

    def send(self, message: draft.DraftRequest) -> None: ...


class Steered(Protocol):
    """A verifier's stream."""

    def steer(self, steering: VerifySteering) -> None: ...


def ask_earlier(verifier: Steered | None, drafters: Iterable[Reader], states: SessionStates) -> None:
    """Ask the verifier for the next pieces, on behalf of the drafters that draft."""
    for drafter in drafters:
        number = states.numbers.get(drafter.spec) if drafter.plan.gamma else None
        if verifier is not None and number is not None and (asked := drafter.earlier.request(number)) is not None:
            verifier.steer(VerifySteering(earlier_states=asked))


def relay_earlier(drafters: Iterable[Reader], reply: EarlierReply) -> int:
    """Send a piece to the drafter that it was asked for; return its bytes."""
    for drafter in drafters:
        if drafter.earlier.take(reply):
            drafter.send(draft.DraftRequest(earlier_states=reply.states))
            return len(reply.states.rows)
    return 0


class EarlierRequests:
    """Requests of one verifier's stream, which are answered in their order."""

    def __init__(self) -> None:
        self._asked: deque[EarlierStates] = deque()

    def note(self, steering: VerifySteering) -> None:
        if steering.earlier_states is not None:
            self._asked.append(steering.earlier_states)

    def reply(self, states: common.HiddenStates) -> EarlierReply:
        """Return a reply with its request. Raise ProtocolViolation for one that no request allows."""
        if not self._asked:
            raise ProtocolViolation("earlier_states is given, must be absent: none were asked for")
        try:
            count = check_rows("earlier_states", states)
        except InvalidRequest as error:
            raise ProtocolViolation(error.message) from error
        asked = self._asked.popleft()
        _check_piece(asked, states, count)
        return EarlierReply(asked, states, count)


def _check_piece(asked: EarlierStates, states: common.HiddenStates, count: int) -> None:
    """Raise ProtocolViolation if the positions of a reply are not among those asked for, or if it is too large."""
    if states.number != asked.number or not asked.position <= states.position <= asked.end - count:
        place = f"{count} of {states.number} from {states.position}"
        raise ProtocolViolation(f"earlier_states is {place}, must be of {asked}")
    if states.ByteSize() > MAX_PIECE_BYTES:
        raise ProtocolViolation(f"earlier_states is {states.ByteSize()} bytes, must be at most {MAX_PIECE_BYTES}")
