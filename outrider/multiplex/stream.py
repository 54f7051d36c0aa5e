"""Stream of one session within a multiplexed one, with flow control of its own. Both sides use it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy

import grpc

from outrider.multiplex.frames import (
    MAX_BATCH_BYTES,
    MESSAGE_COST,
    PART_BYTES,
    PART_COST,
    WINDOW_BYTES,
    FrameQueue,
    resolve,
)
from outrider.protocol.errors import InvalidRequest
from outrider.v1 import multiplex_pb2 as pb

MAX_UNSENT = 1024  # messages, or parts of messages, that the peer does not read
MIN_CREDIT = WINDOW_BYTES // 2
MAX_END_BYTES = 16 * 1024
MAX_ENDING = 8192  # streams that this side has ended and the peer has not
MAX_WINDOW_BYTES = 1024 * 1024  # of the peer, which has as much of each session buffered here

STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class MultiplexedStream:
    """Messages of one session in both directions. A peer that exceeds its window raises InvalidRequest."""

    def __init__(
        self, number: int, streams: dict[int, MultiplexedStream], frames: FrameQueue, window: int, max_bytes: int
    ) -> None:
        """Add the stream to `streams`, where it stays until both sides have ended it."""
        self.number = number
        self._streams = streams
        streams[number] = self
        self.end_received: pb.StreamEnd | None = None
        self.end_sent = False
        self._frames = frames
        self._max_message_bytes = max_bytes
        self._window = self._full_window = window  # bytes that the peer lets us send
        self._unsent: deque[tuple[bytes, bool]] = deque()  # parts for which the window has no room
        self._max_unsent = 0  # set when the first message is sent, of any size
        self._peer_window = WINDOW_BYTES  # bytes that we let the peer send
        self._unconfirmed = 0  # bytes read since the last credit
        self._parts: list[bytes] = []  # of a message that is incomplete
        self._parts_bytes = 0
        self._parts_cost = 0  # of these, until it is confirmed
        self._unread: deque[tuple[bytes, int]] = deque()  # messages, with what is to be confirmed
        self._failure: Exception | None = None
        self._take: Callable[[bytes], object] | None = None  # in place of a reader
        self._waiting: asyncio.Future[None] | None = None  # of the reader
        self._blocked: asyncio.Future[None] | None = None  # of the writer

    @property
    def num_unsent(self) -> int:
        """Return how many parts of messages wait for the peer to read earlier ones."""
        return len(self._unsent)

    # Sending.

    def send(self, message: bytes) -> bool:
        """Send a message, until our end; what exceeds the window waits. Return whether the peer reads fast enough."""
        if self.end_sent or self._failure is not None:
            return True
        if not self._unsent and self._window > 0 and len(message) <= PART_BYTES:
            self._send_part(message, False)
        else:
            starts = range(0, max(1, len(message)), PART_BYTES)
            self._unsent += [(message[at : at + PART_BYTES], at + PART_BYTES < len(message)) for at in starts]
            self._send_unsent()
        self._max_unsent = self._max_unsent or len(self._unsent) + MAX_UNSENT
        return len(self._unsent) <= self._max_unsent

    async def sent(self) -> None:
        """Wait until no message waits for the window."""
        while self._unsent and not self.end_sent and self.end_received is None and self._failure is None:
            self._blocked = asyncio.get_running_loop().create_future()
            await self._blocked

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, details: str = "", error: bytes = b"") -> None:
        """End our side; idempotent. What is unread or unsent is dropped."""
        if self.end_sent:
            return
        self.end_sent = True
        self._unsent.clear()
        self._unread.clear()
        self._parts.clear()
        self._take = None  # it has the session, which has the stream: collections are rare
        self._failure = self._failure and self._failure.with_traceback(None)  # of what took a message: the same
        end = self._frames.add(self.number, len(details.encode()) + len(error)).end
        end.status, end.details, end.error = code.value[0], details, error
        self._wake()
        self._leave()

    def fail(self, error: Exception) -> None:
        """End the stream together with the one that carries it; readers raise the error."""
        self._failure = self._failure or error
        self._unsent.clear()
        self._wake()

    def _send_unsent(self) -> None:
        while self._unsent and self._window > 0:
            self._send_part(*self._unsent.popleft())
        if not self._unsent:
            resolve(self._blocked)

    def _send_part(self, part: bytes, more: bool) -> None:
        self._window -= len(part) + (PART_COST if more else MESSAGE_COST)
        frame = self._frames.add(self.number, len(part))
        frame.payload = part
        if more:
            frame.more = True

    # Receiving.

    def receive(self, frame: pb.SessionFrame) -> None:
        """Take a frame of the peer; raise InvalidRequest for one that no conforming peer sends."""
        if self.end_received is not None:
            raise InvalidRequest.of("frame", "another one", "none after `end`")
        if not (frame.credit or frame.HasField("open") or frame.HasField("payload") or frame.HasField("end")):
            raise InvalidRequest.of("frame", "empty", "open, payload, credit or end")
        if frame.HasField("payload"):
            self._receive_part(frame.payload, frame.more)
        if frame.credit:
            self._receive_credit(frame.credit)
        if frame.HasField("end"):
            if frame.end.ByteSize() > MAX_END_BYTES or frame.end.status not in STATUS_CODES:
                raise InvalidRequest.of("frame.end", frame.end.status, f"a status within {MAX_END_BYTES} bytes")
            self.end_received = frame.end
            self._wake()
            self._leave()

    async def read(self) -> bytes | None:
        """Return the next message, or None after the peer's end; raise the error that ended the carrying stream."""
        while not self._unread:
            if self._failure is not None:
                # A copy: else its traceback would have the sessions of all streams that it ends.
                raise copy(self._failure).with_traceback(self._failure.__traceback__)
            if self.end_received is not None or self.end_sent:
                self._check_end()
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._next()

    def _next(self) -> bytes:
        message, cost = self._unread.popleft()
        if not self._unread:  # the next message may be larger than the window
            cost += self._parts_cost
            self._parts_cost = 0
        self._confirm(cost)
        return message

    def deliver_to(self, take: Callable[[bytes], object]) -> None:
        """Call `take` with each message, later ones as they come. After an error of it, the reader raises that."""
        self._take = take
        while self._unread:
            message = self._next()
            try:
                if self._failure is None:
                    take(message)
            except Exception as error:
                self.fail(error)

    def _receive_part(self, part: bytes, more: bool) -> None:
        if self._peer_window <= 0:
            raise InvalidRequest.of("frame.payload", "another one", "within the window of the stream")
        if len(part) > PART_BYTES:
            raise InvalidRequest.of("frame.payload", f"{len(part)} bytes", f"at most {PART_BYTES}")
        if more and len(part) != PART_BYTES:
            raise InvalidRequest.of("frame.payload", f"{len(part)} bytes", f"{PART_BYTES}, as the message continues")
        cost = len(part) + (PART_COST if more else MESSAGE_COST)
        self._peer_window -= cost
        if self.end_sent:
            return  # late
        self._parts_bytes += len(part)
        if self._parts_bytes > self._max_message_bytes:
            limit = f"message larger than max ({self._parts_bytes} vs. {self._max_message_bytes})"
            self.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, limit)
            return
        self._parts.append(part)
        if more and not self._unread:
            self._confirm(cost)  # the size of a message is bounded already
            return
        self._parts_cost += cost
        if more:
            return
        message = part if len(self._parts) == 1 else b"".join(self._parts)
        self._unread.append((message, self._parts_cost))
        self._parts, self._parts_bytes, self._parts_cost = [], 0, 0
        if self._take is None:
            resolve(self._waiting)
        else:
            self.deliver_to(self._take)

    def refuse(self, code: grpc.StatusCode, details: str) -> None:
        """End the stream because of what the peer sent."""
        self.fail(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), f"CLIENT: Received {details}"))
        self.end(code, f"SERVER: Received {details}")

    def _receive_credit(self, credit: int) -> None:
        if not MIN_CREDIT <= credit <= self._full_window - self._window:
            raise InvalidRequest.of("frame.credit", credit, f"at least {MIN_CREDIT}, and no more than was sent")
        self._window += credit
        self._send_unsent()

    def _confirm(self, cost: int) -> None:
        self._unconfirmed += cost
        if self._unconfirmed >= MIN_CREDIT and not self.end_sent:
            self._frames.add(self.number).credit = self._unconfirmed
            self._peer_window += self._unconfirmed
            self._unconfirmed = 0

    def _check_end(self) -> None:
        """Raise the error of an end that is none in order."""

    def _leave(self) -> None:
        if self.end_sent and self.end_received is not None:
            self._streams.pop(self.number, None)

    def _wake(self) -> None:
        resolve(self._waiting)
        resolve(self._blocked)


def check_batch(batch: pb.SessionFrames) -> Sequence[pb.SessionFrame]:
    """Return the frames of a later batch; raise InvalidRequest for one that no conforming peer sends."""
    if not (batch.frames or batch.pong) or batch.ByteSize() > MAX_BATCH_BYTES:
        frames = f"{len(batch.frames)} frames of {batch.ByteSize()} bytes"
        raise InvalidRequest.of("batch", frames, f"1 or more, of at most {MAX_BATCH_BYTES} bytes")
    return batch.frames


def check_window(batch: pb.SessionFrames) -> int:
    """Return the window that the peer's first batch states."""
    if batch.frames or not WINDOW_BYTES <= batch.window <= MAX_WINDOW_BYTES:
        limit = f"{WINDOW_BYTES} to {MAX_WINDOW_BYTES}, without frames"
        raise InvalidRequest.of("window", batch.window, limit)
    return batch.window
