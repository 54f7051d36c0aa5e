"""What a drafter may send is counted in tokens and bytes, and its times are bounded by ours."""

from __future__ import annotations

import pytest

from coordinator.control.estimator import PairEstimate
from coordinator.control.throughput_model import OPEN_NODES, PLAIN, SpeculationPlan
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.sessions import drafter_stream
from coordinator.sessions.drafter_stream import DrafterStream, DraftLimits
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_connection import WorkerConnection
from outrider.observability.tracing import Span
from outrider.protocol import message_limits
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import MAX_GAMMA, MAX_NODES
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from tests.unit.coordinator.sessions.calls import Sent


def guess(**fields: object) -> common.Guess:
    return common.Guess(position=3, first_id=1, **fields)  # type: ignore[arg-type]


def test_a_drafter_that_sends_much_with_every_commit_is_found_out() -> None:
    limits = DraftLimits(now=0.0)

    def send_much() -> None:
        for _ in range(100):
            for _ in range(96):
                limits.spend(guess(tokens=[1] * MAX_GAMMA), 1.0)
            limits.renew(1.0)

    with pytest.raises(InvalidRequest, match="per commit"):
        send_much()


def test_a_link_that_hung_may_bring_several_commits_worth_at_once() -> None:
    limits = DraftLimits(now=0.0)
    for _ in range(50):
        limits.renew(1.0)
    for _ in range(32):  # sixteen trees
        limits.spend(guess(tokens=[1] * MAX_GAMMA), 1.0)
        limits.spend(guess(tokens=[1] * MAX_GAMMA), 1.0)
    limits.renew(1.0)


def test_a_tree_may_come_as_a_message_per_guess_and_again_after_each_commit() -> None:
    """As long as some of it is accepted."""
    limits = DraftLimits(now=0.0)
    for _ in range(100):
        for _ in range(2 * OPEN_NODES):
            limits.spend(guess(tokens=[1]), 1.0)
        limits.reward(1)
        limits.renew(1.0)


def test_a_tree_ahead_of_a_slow_verifier_may_miss_for_seconds() -> None:
    """Ten steps a second, and one in forty accepts a guess of a tree that is sent anew after each."""
    limits = DraftLimits(now=0.0)
    for number in range(600 * OPEN_NODES):
        now = number / (10 * OPEN_NODES)
        limits.spend(guess(tokens=[1]), now)
        if number % OPEN_NODES == OPEN_NODES - 1:
            limits.reward(int(number // OPEN_NODES % 40 == 39))
            limits.renew(now)


@pytest.mark.parametrize("tokens", [[], [1]])
def test_messages_without_end_are_a_flood(tokens: list[int]) -> None:
    """Though verdicts come, and the messages keep to what follows a commit."""
    limits = DraftLimits(now=0.0)

    def flood() -> None:
        for number in range(10_000):
            now = number / 1000
            limits.spend(guess(tokens=tokens), now)
            if number % 20 == 0:
                limits.reward(0)
                limits.renew(now)

    with pytest.raises(InvalidRequest, match="while none is accepted"):
        flood()


def test_a_drafter_without_luck_may_go_on_at_a_slower_pace() -> None:
    limits = DraftLimits(now=0.0)
    for number in range(10_000):
        limits.spend(guess(tokens=[1]), number / 200)
        limits.renew(number / 200)


def test_guesses_without_a_commit_end() -> None:
    limits = DraftLimits(now=0.0)
    for number in range(16 * 2 * OPEN_NODES):
        limits.spend(guess(), number / 200)
    with pytest.raises(InvalidRequest, match="per commit"):
        limits.spend(guess(), 16 * 2 * OPEN_NODES / 200)


@pytest.mark.parametrize("ahead", [False, True])
def test_no_drafter_has_worked_longer_than_it_was_heard_nothing_of(ahead: bool) -> None:
    limits = DraftLimits(now=10.0)
    limits.renew(10.5)
    bound = limits.bound_us(2**32 - 1, 10.6, ahead=ahead)
    assert bound == pytest.approx(602_000 if ahead else 102_000, abs=2)
    assert limits.bound_us(2**32 - 1, 10.61, ahead=ahead) == pytest.approx(12_000, abs=2)
    assert limits.bound_us(300, 10.7, ahead=ahead) == 300, "a plausible time is taken as reported"


def stream_to_a_drafter() -> tuple[DrafterStream, list[draft.DraftRequest]]:
    model = ModelInfo("m", "f", vocab_size=100)
    connection = WorkerConnection(
        WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", model), lambda: FleetKeys().access(Role.DRAFTER)
    )
    record = SessionRecord("s", SessionRequest((1, 2), SamplingParams(temperature=0.0, seed=1, max_tokens=500)))
    stream = DrafterStream(connection, record, model, Span(), 1, PairEstimate(4), PLAIN)
    stream._call = sent = Sent(draft.DraftRequest)
    return stream, sent.messages


async def test_the_open_guesses_of_three_drafters_fit_the_tree_of_their_session() -> None:
    """Each kept half of a tree open, so the third one's guesses were dropped for as long as it guessed."""
    ahead = SpeculationPlan(8, 3, ahead=True, budget=8)
    stream, messages = stream_to_a_drafter()
    for drafters, nodes in ((1, OPEN_NODES), (3, 85), (3, 85), (4, 64), (2, OPEN_NODES)):
        stream.steer(ahead, drafters)
        assert messages[-1].steer.nodes == nodes
        assert nodes * drafters <= MAX_NODES
    assert len(messages) == 4, "what does not change is not said again"


@pytest.mark.parametrize(
    ("gamma", "drafters", "nodes"), [(MAX_GAMMA, 4, 64), (MAX_GAMMA, 5, 51), (33, 8, 32), (32, 8, 32)]
)
async def test_the_chains_of_many_drafters_fit_the_tree_of_their_session(gamma: int, drafters: int, nodes: int) -> None:
    """Five of 64 guesses filled it, and the last one's were dropped."""
    stream, messages = stream_to_a_drafter()
    stream.steer(SpeculationPlan(gamma), drafters)
    assert messages[-1].steer.nodes == nodes
    assert nodes * drafters <= MAX_NODES


async def test_the_first_guess_does_not_tell_how_long_drafting_takes() -> None:
    """Its time is mostly that of the prompt: with a long one, guesses would not pay at all."""
    stream, _ = stream_to_a_drafter()
    times = {1: 1900, 2: 1000}
    guesses = [common.Guess(position=2, first_id=first, tokens=[5], draft_us=us) for first, us in times.items()]
    stream._call.replies += [draft.DraftReply(guess=guess).SerializeToString() for guess in guesses]
    async for guess in stream.guesses():
        assert guess.draft_us == times[guess.first_id]
        stream.received = guess.first_id  # as the session does
    assert stream.pair.draft_ms.value == 1.0
    await stream.connection.close()


async def test_late_commits_do_not_exceed_a_message() -> None:
    stream, sent = stream_to_a_drafter()
    for position in range(2, 2 + 63):
        stream.commit(position, (7,), None)
    stream.commit(65, (8, 9, 10), None)
    stream.steer(SpeculationPlan(3))
    requests = [sent.pop(0) for _ in range(2)]
    for request in requests:
        message_limits.check_draft_request(request)
    committed = [(request.committed.position, list(request.committed.tokens)) for request in requests]
    assert committed == [(2, [7] * 63), (65, [8, 9, 10])]
    await stream.connection.close()


async def test_a_drafter_without_work_learns_of_commits_when_it_gets_work() -> None:
    stream, sent = stream_to_a_drafter()
    stream.commit(2, (7,), None)
    stream.commit(3, (8, 9), None)
    assert not sent
    stream.steer(SpeculationPlan(3))
    committed = sent.pop(0).committed
    assert (committed.position, list(committed.tokens)) == (2, [7, 8, 9])
    assert sent.pop(0).steer.gamma == 3
    stream.commit(5, (4,), None)
    assert sent.pop(0).committed.position == 5, "with work at once"
    stream.steer(PLAIN)
    assert sent.pop(0).steer.gamma == 0
    for position in range(6, 6 + drafter_stream._MAX_UNSENT_TOKENS):
        assert not sent
        stream.commit(position, (4,), None)
    committed = sent.pop(0).committed
    assert (committed.position, len(committed.tokens)) == (6, drafter_stream._MAX_UNSENT_TOKENS)
    await stream.connection.close()


async def test_hidden_states_wait_for_work_too() -> None:
    """A message with every token would wake the drafter beside each plain step. Those of a prompt go at once."""
    stream, messages = stream_to_a_drafter()
    stream.joined = stream.wants_hidden_states = True

    def commit(position: int, rows: int = 1) -> None:
        states = HiddenStates(position - rows, 1, b"".join(bytes([at, 0]) for at in range(position - rows, position)))
        assert stream.commit(position, (7,), states) == 2 * rows

    def sent() -> tuple[int, int, int, bytes]:
        committed = messages.pop(0).committed
        return committed.position, len(committed.tokens), committed.hidden_states.position, committed.hidden_states.rows

    commit(2, rows=2)
    assert sent() == (2, 1, 0, b"\0\0\1\0")
    for position in (3, 4, 5):
        commit(position)
    assert not messages
    stream.steer(SpeculationPlan(3))
    assert sent() == (3, 3, 2, b"\2\0\3\0\4\0")
    assert messages.pop(0).steer.gamma == 3
    commit(6)
    assert sent() == (6, 1, 5, b"\5\0"), "with work at once, and none twice"
    stream.steer(PLAIN)
    messages.pop(0)
    for position in range(7, 7 + drafter_stream._MAX_UNSENT_TOKENS):
        assert not messages
        commit(position)
    assert sent()[:3] == (7, drafter_stream._MAX_UNSENT_TOKENS, 6)
    await stream.connection.close()
