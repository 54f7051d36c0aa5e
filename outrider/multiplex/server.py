"""Multiplexed calls of a worker: each session of the shared stream runs the handler of the call for one session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import structlog

from outrider.base.aio import Call, background, cancel_all
from outrider.base.config import Settings
from outrider.multiplex.direct_call import DirectCall
from outrider.multiplex.frames import FrameQueue
from outrider.multiplex.stream import MAX_ENDING, MultiplexedStream, check_batch, check_window
from outrider.protocol import convert
from outrider.protocol.errors import Expired, InvalidRequest, OutriderError, Overloaded, Unauthenticated
from outrider.security.api_keys import HEADER, ApiKeys
from outrider.security.error_interceptor import as_outrider_error, checked_reader
from outrider.v1 import multiplex_pb2 as pb

log = structlog.get_logger(__name__)

Handler = Callable[[AsyncIterator[Any], Any], AsyncIterator[Any]]


class MultiplexedHandler:
    """Handler of shared streams."""

    def __init__(self, handler: Handler, decode: Callable[[bytes], Any], keys: ApiKeys, limits: Settings) -> None:
        """Set the handler of one session; `keys` are checked for each, since a caller's may no longer be valid."""
        self.handle = handler
        self.decode = checked_reader(decode)
        self.keys = keys
        self.limits = limits
        self.wake: Callable[[], object] = bool  # called after each batch of frames
        self._open: set[CoordinatorSessions] = set()

    async def serve(self, batches: AsyncIterator[pb.SessionFrames], context: Call) -> AsyncIterator[pb.SessionFrames]:
        shared = CoordinatorSessions(self, dict(context.invocation_metadata() or ()).get(HEADER))
        self._open.add(shared)
        try:
            async with background(shared.receive(batches)):
                while (batch := await shared.frames.next()) is not None:
                    yield batch
            if shared.failure is not None:
                raise shared.failure
        finally:
            self._open.discard(shared)
            await shared.cancel()

    def close(self) -> None:
        """End the shared streams as soon as their sessions have ended."""
        for shared in self._open:
            shared.close()


class CoordinatorSessions:
    """Sessions of one coordinator, over its shared stream."""

    def __init__(self, handler: MultiplexedHandler, key: str | bytes | None) -> None:
        """Begin without sessions; `key` is the connection's."""
        self.frames = FrameQueue(pings=True)
        self.failure: OutriderError | None = None
        self._handler = handler
        self._limits = handler.limits
        self._key = key
        self._window = 0
        self._streams: dict[int, MultiplexedStream] = {}  # those too that one side has ended
        self._running: dict[int, asyncio.Task[None]] = {}
        self._last = 0
        self._closing = False

    async def receive(self, batches: AsyncIterator[pb.SessionFrames]) -> None:
        """Take frames until the coordinator's side ends."""
        try:
            self._window = check_window(await anext(batches, pb.SessionFrames()))
            async for batch in batches:
                self.frames.take_marks(batch)
                for frame in check_batch(batch):
                    self._take(frame)
                self._handler.wake()
        except Exception as error:
            self.failure = as_outrider_error(error)
        self.frames.close()

    def close(self) -> None:
        self._closing = True
        if not self._running:
            self.frames.close()

    async def cancel(self) -> None:
        await cancel_all(list(self._running.values()))

    def _take(self, frame: pb.SessionFrame) -> None:
        number = frame.stream
        if frame.HasField("open"):
            self._start(frame)
        elif number not in self._streams:
            raise InvalidRequest.of("frame.stream", number, "a stream that is open")
        stream = self._streams[number]
        ended = stream.end_sent  # the handler ends, or was cancelled before
        stream.receive(frame)
        if (stream.end_received is not None or stream.end_sent) and not ended and number in self._running:
            self._running[number].cancel()

    def _start(self, frame: pb.SessionFrame) -> None:
        self._last += 1
        if frame.stream != self._last:
            raise InvalidRequest.of("frame.stream", frame.stream, f"{self._last}, the next one")
        if len(self._streams) > (most := self._limits.max_streams + MAX_ENDING):  # thousands may come at once
            raise InvalidRequest.of("streams", len(self._streams), f"at most {most}")
        max_bytes = self._limits.max_message_mib * 1024 * 1024
        stream = MultiplexedStream(self._last, self._streams, self.frames, self._window, max_bytes)
        headers = tuple((header.key, header.header) for header in frame.open.headers)
        refusal: OutriderError | None = None
        if not self._handler.keys.allows(self._key):
            refusal = Unauthenticated("the key of this connection is no longer valid", field="authorization")
        elif len(self._streams) > self._limits.max_streams:
            refusal = Overloaded.of("streams", len(self._streams), f"at most {self._limits.max_streams}")
        if refusal is not None:
            _end(stream, refusal)
            return
        ready, readable = partial(self._ready, stream), partial(self._readable, stream)
        running = asyncio.create_task(self._run(DirectCall(headers, stream, self._handler.decode, ready, readable)))
        self._running[self._last] = running
        running.add_done_callback(lambda _: self._ended(stream))

    def _ended(self, stream: MultiplexedStream) -> None:
        del self._running[stream.number]
        stream.end(grpc.StatusCode.CANCELLED)  # unless it has ended in order
        if self._closing and not self._running:
            self.frames.close()

    async def _run(self, call: DirectCall) -> None:
        """Run the handler of one session and send its replies and its status."""
        stream = call.stream
        try:
            async with contextlib.aclosing(self._handler.handle(call.requests(), call)) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    call.send(reply)
                    await call.readable()
        except Exception as error:
            _end(stream, as_outrider_error(error))
        stream.end()  # unless it has ended

    def _ready(self, stream: MultiplexedStream) -> bool:
        return not (stream.num_unsent or self.frames.pings.is_behind)

    async def _readable(self, stream: MultiplexedStream) -> None:
        if self._ready(stream):
            return
        seconds = self._limits.write_timeout_s
        try:
            async with asyncio.timeout(seconds):
                await stream.sent()
                if self.frames.pings.is_behind:
                    await self.frames.pings.answered.wait()
        except TimeoutError:
            log.info("stream ended: peer does not read", seconds=seconds)
            unread = f"the peer has not read its messages for {seconds:g} s"
            raise Expired(unread, field="write_timeout_s", limit=f"{seconds:g} s") from None


def _end(stream: MultiplexedStream, error: OutriderError) -> None:
    stream.end(grpc.StatusCode[error.grpc_status], error.message, convert.error_to_proto(error).SerializeToString())
    error.with_traceback(None)  # its frames are the session's, which may keep the error: a cycle
