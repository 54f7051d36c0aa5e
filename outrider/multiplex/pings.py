"""Pings within a connection's batches: how late its peer reads."""

from __future__ import annotations

import asyncio
import math
import time

from outrider.protocol.errors import InvalidRequest
from outrider.v1 import multiplex_pb2 as pb

PING_S = 0.05  # between two pings, at least
_PATIENCE_S = 0.02  # with a pong
_RISE, _RISES_TO_S = 1.02, 0.15  # of the fastest time with each pong: a connection's round trip may change
_BUSY = 0.25  # the peer's share of a pong's time, from which the connection is not to blame: its fastest time stays
_MAX_LAG_S = 3600.0  # that a process was paused: the field ends at 71 minutes


class Pings:
    """Pings to a peer, if this side sends any, and pongs to the peer's."""

    def __init__(self, *, sends: bool) -> None:
        self._sends = sends
        self.owes_pong = False
        self._lag_s = 0.0  # from the reading of the last ping until its batch was dealt with
        self._sent_at, self._fastest_s = -math.inf, math.inf  # from a ping to its pong
        self.answered = asyncio.Event()  # the last ping
        self.answered.set()

    def mark(self, batch: pb.SessionFrames) -> None:
        """Add what is due to a batch that leaves now."""
        now = time.monotonic()
        if self.owes_pong:
            batch.pong, batch.lag_us, self.owes_pong = True, int(1e6 * self._lag_s), False
        if self._sends and batch.frames and self.answered.is_set() and now > self._sent_at + PING_S:
            batch.ping, self._sent_at = True, now
            self.answered.clear()

    def take(self, batch: pb.SessionFrames, lag_s: float) -> None:
        """Take the ping and the pong of a batch, `lag_s` after it was read; raise InvalidRequest for one too many."""
        if (batch.ping and self.owes_pong) or (batch.pong and self.answered.is_set()):
            raise InvalidRequest.of("batch", "another ping or pong", "one ping until its pong")
        if batch.ping:
            self.owes_pong, self._lag_s = True, min(lag_s, _MAX_LAG_S)
        if batch.pong:
            took_s = time.monotonic() - self._sent_at
            rise = 1.0 if 1e-6 * batch.lag_us > _BUSY * took_s else _RISE
            most_s = max(self._fastest_s, min(rise * self._fastest_s, _RISES_TO_S))
            self._fastest_s = min(most_s, took_s)
            self.answered.set()

    @property
    def is_behind(self) -> bool:
        """Return whether the peer reads much later than at its fastest of late."""
        patience_s = max(_PATIENCE_S, 2 * self._fastest_s)
        return not self.answered.is_set() and time.monotonic() - self._sent_at > patience_s
