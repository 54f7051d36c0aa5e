"""Frame queue: what one side of a multiplexed stream sends, packed into batches of bounded size."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from outrider.multiplex.pings import Pings
from outrider.v1 import multiplex_pb2 as pb

WINDOW_BYTES = 256 * 1024  # that a session's stream may have unread
PART_BYTES = 16 * 1024  # of a message in one frame
PART_COST = 64  # of the window, besides its bytes
# The same of a message's last part: 32 messages may be on their way. All sessions share one queue in the connection,
# and with thousands of verdicts in it a new session waited minutes for its first one.
MESSAGE_COST = 8 * 1024
MAX_BATCH_BYTES = 64 * 1024
_FRAME_BYTES = 48  # of a frame besides its content, at most


class FrameQueue:
    """Frames to send. Those that are added within one tick of the event loop leave in one batch."""

    def __init__(self, *, pings: bool = False) -> None:
        self.pings = Pings(sends=pings)
        self.made_at = time.monotonic()  # the batch that `next` returned last
        self._batches = deque([(self.made_at, pb.SessionFrames(window=WINDOW_BYTES))])
        self._room = 0  # bytes, in the last batch
        self._waiting: asyncio.Future[None] | None = None  # for a batch
        self._closed = False

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
        while not (self._batches or self.pings.owes_pong):
            if self._closed:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self.made_at, batch = self._batches.popleft() if self._batches else (time.monotonic(), pb.SessionFrames())
        if not self._batches:
            self._room = 0
        self.pings.mark(batch)
        return batch

    def take_marks(self, batch: pb.SessionFrames, lag_s: float = 0.0) -> None:
        """Take the ping and the pong of the peer's batch, `lag_s` after it was read; a pong leaves at once."""
        self.pings.take(batch, lag_s)
        if batch.ping:
            resolve(self._waiting)

    def close(self) -> None:
        self._closed = True
        resolve(self._waiting)


def resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
