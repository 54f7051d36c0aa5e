"""Frame queue: what one side of a multiplexed stream sends, packed into batches of bounded size."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

from outrider.protocol.errors import InvalidRequest
from outrider.v1 import multiplex_pb2 as pb

WINDOW_BYTES = 256 * 1024  # that a session's stream may have unread
PART_BYTES = 16 * 1024  # of a message in one frame
PART_COST = 64  # of the window, besides its bytes
# The same of a message's last part: 32 messages may be on their way. All sessions share one queue in the connection,
# and with thousands of verdicts in it a new session waited minutes for its first one.
MESSAGE_COST = 8 * 1024
MAX_BATCH_BYTES = 64 * 1024
_FRAME_BYTES = 48  # of a frame besides its content, at most
PING_S = 0.05  # between two pings, at least
_PATIENCE_S = 0.02  # with a pong
_RISE, _RISES_TO_S = 1.02, 0.15  # of the fastest time with each pong: a connection's round trip may change
_MAX_LAG_S = 3600.0  # that a process was paused: the field ends at 71 minutes
_BUSY = 0.25  # the peer's share of that time, from which the connection is not to blame


class FrameQueue:
    """Frames to send. Those that are added within one tick of the event loop leave in one batch."""

    def __init__(self, *, pings: bool = False) -> None:
        self._pings = pings
        self.made_at = time.monotonic()  # the batch that `next` returned last
        self._batches = deque([(self.made_at, pb.SessionFrames(window=WINDOW_BYTES))])
        self._room = 0  # bytes, in the last batch
        self._waiting: asyncio.Future[None] | None = None  # for a batch
        self._closed = self._asked = False  # asked for a pong
        self._lag_s = 0.0  # from the reading of the last ping until its batch was dealt with
        self._pinged_at, self._fastest_s = -math.inf, math.inf  # from a ping to its pong
        self.answered = asyncio.Event()  # the last ping
        self.answered.set()

    def add(self, stream: int, size: int = 0) -> pb.SessionFrame:
        """Return a new frame, to be filled at once with content of at most `size` bytes."""
        needed = size + _FRAME_BYTES
        if needed > self._room:
            self._batches.append((time.monotonic(), pb.SessionFrames()))
            self._room = MAX_BATCH_BYTES
        self._room -= needed
        resolve(self._waiting)
        return self._batches[-1][1].frames.add(stream=stream)

    async def next(self) -> pb.SessionFrames | None:
        """Wait for the next batch; return None after the end."""
        while not self._batches and not self._asked:
            if self._closed:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        now = time.monotonic()
        self.made_at, batch = self._batches.popleft() if self._batches else (now, pb.SessionFrames())
        if not self._batches:
            self._room = 0
        if self._asked:
            batch.pong, batch.lag_us, self._asked = True, int(1e6 * self._lag_s), False
        if self._pings and batch.frames and self.answered.is_set() and now > self._pinged_at + PING_S:
            batch.ping, self._pinged_at = True, now
            self.answered.clear()
        return batch

    def take_marks(self, batch: pb.SessionFrames, lag_s: float = 0.0) -> None:
        """Take the ping and the pong of a batch, `lag_s` after it was read; raise InvalidRequest for one too many."""
        if (batch.ping and self._asked) or (batch.pong and self.answered.is_set()):
            raise InvalidRequest.of("batch", "another ping or pong", "one ping until its pong")
        if batch.ping:
            self._asked, self._lag_s = True, min(lag_s, _MAX_LAG_S)
            resolve(self._waiting)
        if batch.pong:
            took_s = time.monotonic() - self._pinged_at
            rise = 1.0 if 1e-6 * batch.lag_us > _BUSY * took_s else _RISE
            most_s = max(self._fastest_s, min(rise * self._fastest_s, _RISES_TO_S))
            self._fastest_s = min(most_s, took_s)
            self.answered.set()

    @property
    def is_behind(self) -> bool:
        """Return whether the peer reads much later than at its fastest of late."""
        patience_s = max(_PATIENCE_S, 2 * self._fastest_s)
        return not self.answered.is_set() and time.monotonic() - self._pinged_at > patience_s

    def close(self) -> None:
        self._closed = True
        resolve(self._waiting)


def resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
