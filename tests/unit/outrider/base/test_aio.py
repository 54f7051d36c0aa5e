"""Background tasks end with the block that they belong to."""

from __future__ import annotations

import asyncio

import pytest

from outrider.base.aio import background, until

SOON_S = 5.0


async def test_no_task_outlives_a_block_that_is_cancelled_twice() -> None:
    """gRPC swallows a cancellation while it opens a call. A session that is left and then fenced is cancelled twice."""
    going = asyncio.Event()

    async def swallow() -> None:
        going.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        async with background(swallow()) as running:
            tasks.extend(running)
            await asyncio.sleep(60)

    block = asyncio.create_task(run())
    await going.wait()
    block.cancel()
    await asyncio.sleep(0.01)
    block.cancel()
    with pytest.raises(asyncio.CancelledError):
        await block
    try:
        assert tasks[0].done()
    finally:
        tasks[0].cancel()
        assert await until(tasks[0].done, SOON_S)
