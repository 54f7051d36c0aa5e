"""Sessions of one coordinator at a worker: how many there may be, and how they are cancelled."""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from outrider.base.aio import until
from outrider.multiplex.frames import MESSAGE_COST, PART_BYTES, WINDOW_BYTES
from outrider.multiplex.server import CoordinatorSessions, DirectCall, Handler, MultiplexedHandler
from outrider.protocol.errors import InvalidRequest
from outrider.security.api_keys import ApiKeys
from outrider.settings.verifier import VerifierSettings
from outrider.v1 import multiplex_pb2 as pb
from outrider.v1 import verifier_pb2 as verify


async def until_the_peer_ends(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield request


def opened(number: int) -> pb.SessionFrame:
    return pb.SessionFrame(stream=number, open=pb.OpenStream())


def make_sessions(handler: Handler, **limits: float) -> CoordinatorSessions:
    settings = VerifierSettings(**limits)  # type: ignore[arg-type]
    return CoordinatorSessions(MultiplexedHandler(handler, bytes, ApiKeys(), settings), None)


async def received(sessions: CoordinatorSessions, *frames: pb.SessionFrame) -> None:
    async def batches() -> AsyncIterator[pb.SessionFrames]:
        yield pb.SessionFrames(window=WINDOW_BYTES)
        for frame in frames:
            yield pb.SessionFrames(frames=[frame])
            await asyncio.sleep(0)

    await sessions.receive(batches())


async def test_refused_streams_that_the_coordinator_does_not_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.multiplex.server.MAX_ENDING", 3)
    sessions = make_sessions(until_the_peer_ends, max_streams=3)
    await received(sessions, *map(opened, range(1, 100)))
    assert isinstance(sessions.failure, InvalidRequest)
    assert sessions.failure.field == "streams"
    assert len(sessions._streams) == 7
    await sessions.cancel()


async def test_streams_that_both_sides_end_are_not_counted() -> None:
    sessions = make_sessions(until_the_peer_ends, max_streams=3)
    over = pb.StreamEnd(status=grpc.StatusCode.CANCELLED.value[0])
    frames = [frame for number in range(1, 50) for frame in (opened(number), pb.SessionFrame(stream=number, end=over))]
    await received(sessions, *frames)
    assert sessions.failure is None
    assert await until(lambda: not sessions._streams, 5), "else later ones are refused"
    await sessions.cancel()


async def test_a_stream_too_many_is_ended_with_the_reason() -> None:
    sessions = make_sessions(until_the_peer_ends, max_streams=1)
    await received(sessions, *map(opened, (1, 2)))
    assert [stream.end_sent for stream in sessions._streams.values()] == [False, True]
    assert list(sessions._running) == [1]
    ends = [frame.end for _, batch in sessions.frames._batches for frame in batch.frames if frame.HasField("end")]
    assert [end.status for end in ends] == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]
    assert "streams is 2, must be at most 1" in ends[0].details
    await sessions.cancel()


async def test_a_session_that_fails_leaves_nothing_to_the_collector_of_garbage() -> None:
    """Collections are rare in a worker, and a session may hold a row of the vocabulary on the GPU."""
    held: list[weakref.ref[Exception]] = []

    async def failing(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        ended = [InvalidRequest("no")]  # as the session's frame keeps it
        held.append(weakref.ref(ended[0]))
        if ended:
            raise ended[0]
        yield b""

    gc.disable()
    try:
        sessions = make_sessions(failing)
        await received(sessions, opened(1))
        assert await until(lambda: bool(held) and not sessions._running, 5)
        assert [error() for error in held] == [None]
    finally:
        gc.enable()


async def test_a_session_whose_messages_are_delivered_leaves_nothing_to_the_collector_of_garbage() -> None:
    class Session:
        def __init__(self, call: DirectCall) -> None:
            self.send = call.send
            self.taken: list[bytes] = []

    held: list[weakref.ref[Session]] = []

    async def delivering(requests: AsyncIterator[Any], context: DirectCall) -> AsyncIterator[Any]:
        session = Session(context)
        held.append(weakref.ref(session))
        context.deliver(lambda message: session.taken.append(message))
        yield verify.VerifyReply()

    gc.disable()
    try:
        sessions = make_sessions(delivering)
        await received(sessions, opened(1), pb.SessionFrame(stream=1, payload=b"x"))
        assert await until(lambda: bool(held) and not sessions._running, 5)
        assert [session() for session in held] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [InvalidRequest, KeyError])
async def test_a_session_that_refuses_a_message_leaves_nothing_but_where_an_unexpected_error_was(
    kind: type[Exception],
) -> None:
    class Session:
        def take(self, message: Any) -> None:
            raise kind("no")

    held: list[weakref.ref[Session]] = []

    async def delivering(requests: AsyncIterator[Any], context: DirectCall) -> AsyncIterator[Any]:
        session = Session()
        held.append(weakref.ref(session))
        yield verify.VerifyReply()
        context.deliver(session.take)
        async for _ in requests:
            pytest.fail("it is delivered")

    gc.disable()
    try:
        settings = VerifierSettings()
        sessions = CoordinatorSessions(
            MultiplexedHandler(delivering, verify.VerifyRequest.FromString, ApiKeys(), settings), None
        )
        with capture_logs() as lines:
            await received(sessions, opened(1), pb.SessionFrame(stream=1, payload=b""))
            assert await until(lambda: bool(held) and not sessions._running, 5)
        shown = ["".join(traceback.format_exception(line.pop("exc_info"))) for line in lines]
        assert ["in take" in text for text in shown] == ([True] if kind is KeyError else [])
        assert [session() for session in held] == [None]
    finally:
        gc.enable()


async def test_a_session_is_cancelled_once() -> None:
    """What it cleans up is not interrupted by late frames."""
    cancelled = 0
    cleaned = asyncio.Event()

    async def handler(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        nonlocal cancelled
        while not cleaned.is_set():
            try:
                await cleaned.wait()
            except asyncio.CancelledError:
                cancelled += 1
        for none in ():
            yield none

    sessions = make_sessions(handler, max_message_mib=1)
    large = [pb.SessionFrame(stream=1, payload=b"x" * PART_BYTES, more=True)] * 65
    late = [pb.SessionFrame(stream=1, payload=b"x")] * 5
    await received(sessions, opened(1), *large, *late, pb.SessionFrame(stream=1, end=pb.StreamEnd()))
    assert sessions.failure is None
    assert cancelled == 1
    cleaned.set()
    await sessions.cancel()


async def test_a_new_session_does_not_wait_for_the_backlog_of_others() -> None:
    """However slow the peer is, those that always have something to send leave only a few messages in its way."""
    num_sessions, late = 50, 51

    async def endless(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        while True:
            yield verify.FileChunk(data=b"x" * 1000)
            await asyncio.sleep(0)

    sessions = make_sessions(endless)

    async def slow_peer() -> int:
        """Read a batch now and then; return the number of messages before the first one of the late session."""
        others = 0
        while (batch := await sessions.frames.next()) is not None:
            for frame in batch.frames:
                if frame.stream == late:
                    return others
                others += frame.HasField("payload") and late in sessions._streams
            for _ in range(200):
                await asyncio.sleep(0)
        raise AssertionError("the late session sends something")

    async def batches() -> AsyncIterator[pb.SessionFrames]:
        yield pb.SessionFrames(window=WINDOW_BYTES)
        yield pb.SessionFrames(frames=map(opened, range(1, num_sessions + 1)))
        for _ in range(2000):
            await asyncio.sleep(0)
        yield pb.SessionFrames(frames=[opened(late)])
        await asyncio.Event().wait()

    receiving = asyncio.create_task(sessions.receive(batches()))
    assert await slow_peer() <= num_sessions * 33
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    await sessions.cancel()


async def test_a_handler_waits_for_a_peer_that_reads_nothing_and_not_for_ever() -> None:
    """What it goes on to make would stay in memory."""
    made = 0

    async def talkative(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        nonlocal made
        while True:
            made += 1
            yield verify.VerifyReply()
            await asyncio.sleep(0)

    sessions = make_sessions(talkative, write_timeout_s=0.2)
    await received(sessions, opened(1))
    stream = sessions._streams[1]
    assert await until(lambda: stream.end_sent, 5)
    assert made < 2 * WINDOW_BYTES // MESSAGE_COST
    await sessions.cancel()


async def test_a_shared_stream_ends_with_its_last_session_when_the_worker_leaves() -> None:
    """The server stops when no call is left; until then it would wait as long as it may."""
    limits = VerifierSettings()
    handler = MultiplexedHandler(until_the_peer_ends, bytes, ApiKeys(), limits)  # type: ignore[arg-type]
    left = asyncio.Event()

    async def batches() -> AsyncIterator[pb.SessionFrames]:
        yield pb.SessionFrames(window=WINDOW_BYTES)
        yield pb.SessionFrames(frames=[opened(1)])
        await left.wait()
        yield pb.SessionFrames(frames=[pb.SessionFrame(stream=1, end=pb.StreamEnd())])
        await asyncio.Event().wait()

    async def serve() -> None:
        async for _ in handler.serve(batches(), SimpleNamespace(invocation_metadata=tuple)):  # type: ignore[arg-type]
            pass

    serving = asyncio.create_task(serve())
    assert await until(lambda: any(shared._running for shared in handler._open), 5)
    handler.close()
    await asyncio.sleep(0.05)
    assert not serving.done(), "its session goes on"
    left.set()
    await asyncio.wait_for(serving, 5)
