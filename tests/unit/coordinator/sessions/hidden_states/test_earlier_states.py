"""Earlier states at a coordinator: one request at a time for each drafter, and no reply that it does not allow."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from coordinator.control.throughput_model import PLAIN, SpeculationPlan
from coordinator.sessions.hidden_states.earlier_states import (
    MAX_PIECE_BYTES,
    EarlierProgress,
    EarlierReply,
    EarlierRequests,
    ask_earlier,
    relay_earlier,
)
from coordinator.sessions.hidden_states.session_states import SessionStates
from outrider.protocol.errors import ProtocolViolation
from outrider.protocol.hidden_states.earlier_states import MAX_EARLIER_POSITIONS, EarlierStates
from outrider.protocol.hidden_states.messages import FINAL_STATES, HiddenStates, StateSpec
from outrider.protocol.speculation import VerifySteering
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft


@dataclass
class Drafter:
    """A drafter's stream that keeps what is sent."""

    earlier: EarlierProgress
    plan: SpeculationPlan = field(default_factory=lambda: SpeculationPlan(4))
    spec: StateSpec = FINAL_STATES
    sent: list[tuple[int, int]] = field(default_factory=list)

    def send(self, message: draft.DraftRequest) -> None:
        states = message.earlier_states
        self.sent.append((states.position, states.position + len(states.rows) // 2))


@dataclass
class Verifier:
    """A verifier's stream that answers with pieces of 30 positions, of what it has from `kept` on."""

    kept: int = 0
    requests: EarlierRequests = field(default_factory=EarlierRequests)
    asked: list[EarlierStates] = field(default_factory=list)

    def steer(self, steering: VerifySteering) -> None:
        self.requests.note(steering)
        assert steering.earlier_states is not None
        self.asked.append(steering.earlier_states)

    def replies(self) -> list[EarlierReply]:
        asked, self.asked = self.asked, []
        return [self.requests.reply(piece(max(each.position, self.kept), each.end)) for each in asked]


def piece(first: int, end: int, number: int = 0) -> common.HiddenStates:
    count = max(0, min(30, end - first))
    return common.HiddenStates(position=first if count else end, width=1, rows=bytes(2 * count), number=number)


def states(first: int, end: int) -> HiddenStates:
    return HiddenStates(first, 1, bytes(2 * (end - first)))


def run(verifier: Verifier, *drafters: Drafter, verdicts: int = 10) -> None:
    for _ in range(verdicts):
        ask_earlier(verifier, drafters, SessionStates(None))
        assert len(verifier.asked) <= len(drafters)
        for reply in verifier.replies():
            relay_earlier(drafters, reply)


def test_pieces_come_one_by_one_up_to_the_first_states() -> None:
    drafter = Drafter(EarlierProgress(4096))
    drafter.earlier.follow(states(100, 356))
    run(Verifier(), drafter)
    assert drafter.sent == [(0, 30), (30, 60), (60, 90), (90, 100)]
    drafter.earlier.follow(states(356, 360))
    run(Verifier(), drafter)
    assert len(drafter.sent) == 4, "what follows the first states is no gap"


@pytest.mark.parametrize(("wanted", "kept", "first"), [(50, 0, 50), (4096, 70, 70), (1 << 31, 0, 0)])
def test_they_begin_where_they_are_wanted_and_kept(wanted: int, kept: int, first: int) -> None:
    drafter = Drafter(EarlierProgress(wanted))
    drafter.earlier.follow(states(100, 110))
    run(Verifier(kept), drafter)
    assert drafter.sent[0][0] == first
    assert drafter.sent[-1][1] == 100
    assert drafter.earlier.wanted <= MAX_EARLIER_POSITIONS


@pytest.mark.parametrize("drafter", [Drafter(EarlierProgress(0)), Drafter(EarlierProgress(4096), plan=PLAIN)])
def test_nothing_is_asked_for_without_a_wish_or_without_drafting(drafter: Drafter) -> None:
    drafter.earlier.follow(states(100, 110))
    run(Verifier(), drafter)
    assert drafter.sent == []


def test_what_is_not_kept_is_asked_for_once() -> None:
    drafter, verifier = Drafter(EarlierProgress(4096)), Verifier(kept=100)
    drafter.earlier.follow(states(100, 110))
    run(verifier, drafter, verdicts=1)
    ask_earlier(verifier, [drafter], SessionStates(None))
    assert (verifier.asked, drafter.sent) == ([], [])


def test_a_piece_that_was_dropped_meanwhile_ends_them() -> None:
    drafter, verifier = Drafter(EarlierProgress(4096)), Verifier()
    drafter.earlier.follow(states(100, 110))
    run(verifier, drafter, verdicts=1)
    verifier.kept = 60
    run(verifier, drafter)
    assert drafter.sent == [(0, 30)]


def test_after_a_gap_they_begin_again_and_a_late_reply_is_dropped() -> None:
    drafter, verifier = Drafter(EarlierProgress(4096)), Verifier()
    drafter.earlier.follow(states(20, 30))
    ask_earlier(verifier, [drafter], SessionStates(None))
    drafter.earlier.follow(states(40, 50))
    run(verifier, drafter)
    assert drafter.sent == [(0, 30), (30, 40)]


def test_two_drafters_get_their_own() -> None:
    one, other = Drafter(EarlierProgress(4096)), Drafter(EarlierProgress(40))
    for drafter in (one, other):
        drafter.earlier.follow(states(100, 110))
    run(Verifier(), one, other)
    assert one.sent == [(0, 30), (30, 60), (60, 90), (90, 100)]
    assert other.sent == [(60, 90), (90, 100)]


@pytest.mark.parametrize(
    "reply",
    [
        piece(0, 10),  # before what was asked for
        piece(95, 101),  # beyond it
        piece(50, 60, number=1),
        common.HiddenStates(position=50, width=1, rows=bytes(3)),
        common.HiddenStates(position=50, width=0, rows=b""),
        common.HiddenStates(position=50, width=MAX_PIECE_BYTES // 8, rows=bytes(5 * (MAX_PIECE_BYTES // 4))),
    ],
)
def test_no_verifier_sends_what_was_not_asked_for(reply: common.HiddenStates) -> None:
    requests = EarlierRequests()
    requests.note(VerifySteering(earlier_states=EarlierStates(0, 50, 100)))
    with pytest.raises(ProtocolViolation):
        requests.reply(reply)


def test_no_verifier_answers_twice() -> None:
    requests = EarlierRequests()
    requests.note(VerifySteering(gamma=3))
    requests.note(VerifySteering(earlier_states=EarlierStates(0, 50, 100)))
    assert requests.reply(piece(50, 100)).count == 30
    with pytest.raises(ProtocolViolation, match="none were asked for"):
        requests.reply(piece(50, 100))
