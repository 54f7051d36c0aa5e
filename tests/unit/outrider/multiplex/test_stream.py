"""Streams within a shared one: order, flow control, and what no conforming peer sends."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.multiplex import client
from outrider.multiplex.frames import MAX_BATCH_BYTES, MESSAGE_COST, PART_BYTES, WINDOW_BYTES, FrameQueue
from outrider.multiplex.stream import MultiplexedStream, check_batch, check_window
from outrider.protocol.errors import InvalidRequest
from outrider.v1 import multiplex_pb2 as pb

MIB = 1024 * 1024
SLOW_S = 0.02


def make_stream(max_message: int = MIB) -> tuple[MultiplexedStream, FrameQueue]:
    frames = FrameQueue()
    return MultiplexedStream(1, {}, frames, WINDOW_BYTES, max_message), frames


async def taken(frames: FrameQueue) -> list[pb.SessionFrame]:
    """Return the frames that are ready to be sent; each batch is within its limit."""
    found: list[pb.SessionFrame] = []
    while frames._batches:
        batch = await frames.next()
        assert batch is not None
        if batch.window:
            continue
        found += check_batch(batch)
    return found


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 100, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, WINDOW_BYTES * 2]), max_size=30
    ),
    greedy=st.booleans(),
)
def test_messages_of_any_size_arrive_whole_and_in_order(sizes: list[int], greedy: bool) -> None:
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]

    async def run() -> list[bytes]:
        (sender, outgoing), (receiver, back) = make_stream(), make_stream()
        for message in messages:
            sender.send(message)
        read: list[bytes] = []
        while len(read) < len(messages):
            for frame in await taken(outgoing):
                receiver.receive(frame)
            while receiver._unread:
                message = await receiver.read()
                assert message is not None
                read.append(message)
                if not greedy:
                    break
            for frame in await taken(back):
                sender.receive(frame)
        assert not sender.num_unsent
        return read

    assert asyncio.run(run()) == messages


async def test_a_reader_that_stops_bounds_what_is_sent() -> None:
    (sender, outgoing), (receiver, back) = make_stream(), make_stream()
    for _ in range(100_000):
        sender.send(b"x")
    sent = await taken(outgoing)
    assert len(sent) <= 1 + WINDOW_BYTES // MESSAGE_COST
    for frame in sent:
        receiver.receive(frame)
    assert sender.num_unsent > 90_000
    waiting = asyncio.ensure_future(sender.sent())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not await taken(back), "no credit for what nobody has read"
    while receiver._unread:
        await receiver.read()
    credited = [frame.credit for frame in await taken(back)]
    assert credited
    assert min(credited) >= WINDOW_BYTES // 2
    assert sum(credited) <= len(sent) * (1 + MESSAGE_COST)


async def test_a_peer_that_ignores_its_window_is_found_out() -> None:
    receiver, _ = make_stream()

    def flood() -> None:
        for _ in range(WINDOW_BYTES // 64 + 1):
            receiver.receive(pb.SessionFrame(stream=1, payload=b"x"))

    with pytest.raises(InvalidRequest, match="window"):
        flood()


async def test_a_session_that_has_ended_gives_no_credit() -> None:
    """Late messages are dropped, and a flood of them is found out."""
    receiver, frames = make_stream()
    receiver.end(grpc.StatusCode.CANCELLED)
    receiver.receive(pb.SessionFrame(stream=1, payload=b"late"))
    assert [frame.HasField("end") for frame in await taken(frames)] == [True]

    def flood() -> None:
        for _ in range(WINDOW_BYTES // 64 + 1):
            receiver.receive(pb.SessionFrame(stream=1, payload=b"x"))

    with pytest.raises(InvalidRequest, match="window"):
        flood()


@pytest.mark.parametrize(
    "frame",
    [
        pb.SessionFrame(stream=1),
        pb.SessionFrame(stream=1, more=True),
        pb.SessionFrame(stream=1, payload=b"x" * (PART_BYTES + 1)),
        pb.SessionFrame(stream=1, payload=b"", more=True),
        pb.SessionFrame(stream=1, payload=b"x" * (PART_BYTES - 1), more=True),
        pb.SessionFrame(stream=1, credit=1),
        pb.SessionFrame(stream=1, credit=WINDOW_BYTES),
        pb.SessionFrame(stream=1, end=pb.StreamEnd(status=99)),
        pb.SessionFrame(stream=1, end=pb.StreamEnd(details="x" * 20_000)),
    ],
)
async def test_a_frame_that_no_conforming_peer_sends_is_refused(frame: pb.SessionFrame) -> None:
    stream, _ = make_stream()
    with pytest.raises(InvalidRequest, match="frame"):
        stream.receive(frame)


async def test_nothing_follows_the_end() -> None:
    stream, _ = make_stream()
    stream.receive(pb.SessionFrame(stream=1, payload=b"last", end=pb.StreamEnd()))
    assert await stream.read() == b"last"
    assert await stream.read() is None
    with pytest.raises(InvalidRequest, match="none after"):
        stream.receive(pb.SessionFrame(stream=1, payload=b"x"))


async def test_what_was_not_read_before_our_own_end_is_dropped() -> None:
    """It would stay in memory until the peer ends, and a handler that cleans up would get it."""
    stream, _ = make_stream()
    stream.receive(pb.SessionFrame(stream=1, payload=b"unread"))
    stream.receive(pb.SessionFrame(stream=1, payload=b"x" * PART_BYTES, more=True))
    stream.end(grpc.StatusCode.CANCELLED)
    assert await stream.read() is None
    assert [*stream._unread, *stream._parts] == []


async def test_who_waits_for_a_message_or_for_room_learns_of_it_and_of_a_loss() -> None:
    stream, _ = make_stream()
    reading = asyncio.ensure_future(stream.read())
    await asyncio.sleep(0)
    stream.receive(pb.SessionFrame(stream=1, payload=b"x"))
    assert await asyncio.wait_for(reading, 5) == b"x"
    stream.send(b"x" * 2 * WINDOW_BYTES)
    reading, writing = asyncio.ensure_future(stream.read()), asyncio.ensure_future(stream.sent())
    await asyncio.sleep(0)
    assert not writing.done()
    stream.fail(ConnectionError("lost"))
    with pytest.raises(ConnectionError, match="lost"):
        await asyncio.wait_for(reading, 5)
    await asyncio.wait_for(writing, 5)


async def test_a_message_above_the_limit_ends_its_own_stream() -> None:
    receiver, frames = make_stream(max_message=3 * PART_BYTES)
    for _ in range(4):
        receiver.receive(pb.SessionFrame(stream=1, payload=b"x" * PART_BYTES, more=True))
    with pytest.raises(grpc.aio.AioRpcError, match="CLIENT: Received message larger than max"):
        await receiver.read()
    ends = [frame.end for frame in await taken(frames) if frame.HasField("end")]
    assert [end.status for end in ends] == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]


async def test_frames_of_one_tick_leave_in_one_batch() -> None:
    frames = FrameQueue()
    assert check_window(await frames.next() or pb.SessionFrames()) == WINDOW_BYTES
    for number in range(1, 65):
        MultiplexedStream(number, {}, frames, WINDOW_BYTES, MIB).send(b"verdict" * 10)
    batch = await frames.next()
    assert batch is not None
    assert [frame.stream for frame in batch.frames] == list(range(1, 65))
    frames.close()
    assert await frames.next() is None


async def test_large_messages_that_nobody_reads_use_up_the_window() -> None:
    """Only the parts of the message that is read next are credited before it is complete."""
    (sender, outgoing), (receiver, back) = make_stream(), make_stream()
    for _ in range(8):
        sender.send(b"x" * MIB)
    for _ in range(100):
        for frame in await taken(outgoing):
            receiver.receive(frame)
        for frame in await taken(back):
            sender.receive(frame)
    held = sum(len(message) for message, _ in receiver._unread) + receiver._parts_bytes
    assert MIB <= held <= MIB + WINDOW_BYTES + PART_BYTES
    assert sender.num_unsent


@pytest.mark.parametrize("how", ["ended", "failed"])
async def test_nothing_is_sent_after_our_own_end(how: str) -> None:
    stream, frames = make_stream()
    if how == "ended":
        stream.end(grpc.StatusCode.CANCELLED)
    else:
        stream.fail(ConnectionError("lost"))
    for size in (1, 3 * PART_BYTES):
        stream.send(b"x" * size)
    assert not [frame for frame in await taken(frames) if frame.HasField("payload")]
    assert not stream.num_unsent


@pytest.mark.parametrize(
    "batch", [pb.SessionFrames(), pb.SessionFrames(frames=[pb.SessionFrame(payload=b"x" * (MAX_BATCH_BYTES + 1))])]
)
def test_a_batch_that_is_empty_or_too_large_is_refused(batch: pb.SessionFrames) -> None:
    with pytest.raises(InvalidRequest, match="batch"):
        check_batch(batch)


@pytest.mark.parametrize("window", [0, WINDOW_BYTES - 1, MIB + 1, 2**31])
def test_a_window_that_cannot_be_is_refused(window: int) -> None:
    with pytest.raises(InvalidRequest, match="window"):
        check_window(pb.SessionFrames(window=window))


async def test_a_worker_that_ends_no_stream_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that we have ended is kept until it ends its side."""
    monkeypatch.setattr(client, "MAX_ENDING", 3)
    shared = client.SharedStream(cast(grpc.aio.Channel, None), MIB)
    shared._window = WINDOW_BYTES
    for _ in range(4):
        shared.start(()).end(grpc.StatusCode.CANCELLED)
    late = pb.SessionFrames(frames=[pb.SessionFrame(stream=1, payload=b"x")])
    with pytest.raises(InvalidRequest, match="not ended"):
        await shared._receive(late)


async def test_a_large_batch_leaves_turns_to_what_else_is_ready() -> None:
    """A new request needs tens of turns of the event loop, and would wait for all sessions in each of them."""
    shared = client.SharedStream(cast(grpc.aio.Channel, None), MIB)
    shared._window = WINDOW_BYTES
    calls = [shared.start(()) for _ in range(3 * client.FRAMES_AT_ONCE + 1)]
    batch = pb.SessionFrames(frames=[pb.SessionFrame(stream=call.number, payload=b"x") for call in calls])
    receiving = asyncio.create_task(shared._receive(batch))
    taken_by_turn = []
    while not receiving.done():
        await asyncio.sleep(0)
        taken_by_turn.append(sum(bool(call._unread) for call in calls))
    assert taken_by_turn == [*range(client.FRAMES_AT_ONCE, len(calls), client.FRAMES_AT_ONCE), len(calls)]


async def test_a_ping_is_answered_once_its_batch_was_dealt_with() -> None:
    shared = client.SharedStream(cast(grpc.aio.Channel, None), MIB)
    shared._window = WINDOW_BYTES
    call = shared.start(())
    await taken(shared._frames)
    batch = pb.SessionFrames(ping=True, frames=[pb.SessionFrame(stream=call.number, payload=b"x")])
    receiving = asyncio.create_task(shared._receive(batch))
    reading = asyncio.create_task(slow_reader(call))
    await receiving
    assert reading.done()
    answer = await shared._frames.next()
    assert answer is not None
    assert answer.pong
    assert answer.lag_us >= 1e6 * SLOW_S


def work() -> None:
    time.sleep(SLOW_S)


async def slow_reader(call: MultiplexedStream) -> None:
    assert await call.read() == b"x"
    work()


async def test_messages_that_are_delivered_come_in_order_and_are_confirmed_until_one_raises() -> None:
    receiver, frames = make_stream()
    taken_messages: list[bytes] = []

    def take(message: bytes) -> None:
        if message == b"bad":
            raise ValueError("no message")
        taken_messages.append(message)

    receiver.receive(pb.SessionFrame(stream=1, payload=b"early"))
    receiver.deliver_to(take)
    reading = asyncio.ensure_future(receiver.read())
    await asyncio.sleep(0)
    for number in range(40):
        receiver.receive(pb.SessionFrame(stream=1, payload=b"%d" % number))
        for frame in await taken(frames) if number == 20 else ():
            assert frame.credit >= WINDOW_BYTES // 2
    assert taken_messages == [b"early", *(b"%d" % number for number in range(40))]
    assert not reading.done()
    for message in (b"bad", b"late"):
        receiver.receive(pb.SessionFrame(stream=1, payload=message))
    with pytest.raises(ValueError, match="no message"):
        await reading
    assert b"late" not in taken_messages
