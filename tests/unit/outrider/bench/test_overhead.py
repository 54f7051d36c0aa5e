"""A session that ends while rounds are measured is an error of the measurement."""

from __future__ import annotations

import asyncio

import pytest

from outrider.bench.overhead.concurrent_rounds import _check_running
from outrider.protocol.errors import OutriderError


async def test_a_session_that_failed_or_ended_is_named() -> None:
    async def fail() -> None:
        raise ValueError("the cause")

    async def end() -> None:
        pass

    for ended, error, words in ((fail(), ValueError, "the cause"), (end(), OutriderError, "session 1 ended")):
        tasks = [asyncio.create_task(asyncio.sleep(60)), asyncio.create_task(ended)]
        _check_running(tasks)
        await asyncio.wait(tasks[1:])
        with pytest.raises(error, match=words):
            _check_running(tasks)
        tasks[0].cancel()
