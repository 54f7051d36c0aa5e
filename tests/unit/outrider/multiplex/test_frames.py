"""Frame queues: how a sender notices that its peer reads late."""

from __future__ import annotations

import pytest

from outrider.multiplex import frames, pings
from outrider.multiplex.frames import FrameQueue
from outrider.multiplex.pings import PING_S
from outrider.multiplex.stream import check_batch
from outrider.protocol.errors import InvalidRequest
from outrider.v1 import multiplex_pb2 as pb


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (frames, pings):
        monkeypatch.setattr(module, "time", clock)
    return clock


async def sent(queue: FrameQueue, *, new: bool = True) -> pb.SessionFrames:
    """Return the next batch, of one new frame, as the peer gets it."""
    if new:
        queue.add(1)
    batch = await queue.next()
    assert batch is not None
    check_batch(batch)
    return pb.SessionFrames.FromString(batch.SerializeToString())


async def connected(clock: Clock) -> tuple[FrameQueue, FrameQueue]:
    """Return two sides whose fastest answer took 4 ms."""
    ours, theirs = FrameQueue(pings=True), FrameQueue()
    for side in (ours, theirs):
        assert await side.next() is not None  # the window
    batch = await sent(ours)
    assert batch.ping
    clock.now += 0.004
    theirs.take_marks(batch)
    ours.take_marks(await sent(theirs, new=False))
    return ours, theirs


async def test_a_peer_is_behind_while_its_answer_takes_much_longer_than_its_fastest(clock: Clock) -> None:
    ours, theirs = await connected(clock)
    clock.now += PING_S
    asked = await sent(ours)
    assert asked.ping
    clock.now += 0.019
    assert not ours.pings.is_behind
    clock.now += 0.002
    assert ours.pings.is_behind
    assert not (await sent(ours)).ping, "one at a time"
    theirs.take_marks(asked)
    ours.take_marks(await sent(theirs, new=False))
    assert not ours.pings.is_behind
    assert ours.pings.answered.is_set()


async def test_a_connection_that_gets_slower_makes_no_peer_late_for_ever(clock: Clock) -> None:
    """As where the network takes another way: the peer counted as late until its coordinator was restarted."""
    ours, theirs = await connected(clock)
    late = []
    for _ in range(200):
        clock.now += PING_S
        asked = await sent(ours)
        clock.now += 0.15
        late.append(ours.pings.is_behind)
        theirs.take_marks(asked)
        ours.take_marks(await sent(theirs))
    assert late[0]
    assert not late[-1]


@pytest.mark.parametrize("late_s", [0.4, 2.0])
async def test_a_peer_that_reads_late_for_long_is_not_taken_for_a_slow_connection(clock: Clock, late_s: float) -> None:
    ours, theirs = await connected(clock)
    for _ in range(1000):
        clock.now += PING_S
        asked = await sent(ours)
        clock.now += late_s
        assert ours.pings.is_behind
        theirs.take_marks(asked)
        ours.take_marks(await sent(theirs))


@pytest.mark.parametrize(("lag_s", "late"), [(0.05, True), (0.03, False)])
async def test_a_busy_peer_is_not_taken_for_a_slow_connection(clock: Clock, lag_s: float, late: bool) -> None:
    """It says how long it was busy: what takes it 0.15 s each time would be as fast as it gets after some seconds."""
    ours, theirs = await connected(clock)
    for _ in range(200):
        clock.now += PING_S
        asked = await sent(ours)
        clock.now += 0.15
        was_late = ours.pings.is_behind
        theirs.take_marks(asked, lag_s)
        ours.take_marks(await sent(theirs))
    assert was_late == late


async def test_a_process_that_was_paused_for_a_day_answers_a_ping(clock: Clock) -> None:
    ours, theirs = await connected(clock)
    clock.now += PING_S
    theirs.take_marks(await sent(ours), 24 * 3600.0)
    answer = await sent(theirs)
    assert answer.pong
    assert answer.lag_us == 3_600_000_000


async def test_a_slow_connection_makes_no_peer_late(clock: Clock) -> None:
    ours, theirs = FrameQueue(pings=True), FrameQueue()
    for side in (ours, theirs):
        assert await side.next() is not None
    for _ in range(3):
        asked = await sent(ours)
        clock.now += 0.15
        assert not ours.pings.is_behind
        theirs.take_marks(asked)
        ours.take_marks(await sent(theirs))


async def test_a_peer_that_answers_nothing_is_never_behind(clock: Clock) -> None:
    ours = FrameQueue(pings=True)
    assert await ours.next() is not None
    assert (await sent(ours)).ping
    clock.now += 60
    assert not ours.pings.is_behind


async def test_pings_are_rare_and_answers_have_none(clock: Clock) -> None:
    ours, theirs = await connected(clock)
    assert not (await sent(ours)).ping
    clock.now += PING_S
    asked = await sent(ours)
    theirs.take_marks(asked)
    clock.now += PING_S
    answer = await sent(theirs, new=False)
    assert answer.pong
    assert not answer.frames
    assert not answer.ping
    assert not (await sent(theirs)).pong, "once"


async def test_marks_that_no_conforming_peer_sends_are_refused(clock: Clock) -> None:
    """A flood of them would cost this side as much as messages, which have windows."""
    ours, theirs = await connected(clock)
    with pytest.raises(InvalidRequest, match="ping"):
        ours.take_marks(pb.SessionFrames(pong=True))  # nobody asked
    with pytest.raises(InvalidRequest, match="ping"):
        theirs.take_marks(pb.SessionFrames(pong=True))
    clock.now += PING_S
    asked = await sent(ours)
    theirs.take_marks(asked)
    with pytest.raises(InvalidRequest, match="ping"):
        theirs.take_marks(asked)
