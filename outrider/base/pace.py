"""Pace: a mean rate of messages with a burst. A drafter sends at half the rate at which coordinators read."""

from __future__ import annotations

import asyncio
import time


class Pace:
    """Wait so that messages keep to a mean rate; `burst` of them may follow each other at once."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._seconds = 1 / per_s
        self._burst_s = burst / per_s
        self._ready_at = time.monotonic()

    async def wait(self) -> None:
        now = time.monotonic()
        self._ready_at = max(self._ready_at, now - self._burst_s) + self._seconds
        if self._ready_at > now:
            await asyncio.sleep(self._ready_at - now)
