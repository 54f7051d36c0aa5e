"""Asyncio helpers: wait for a condition, run tasks beside a block, end the process when a critical task fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from outrider.protocol.errors import Expired, InvalidRequest

log = structlog.get_logger(__name__)

T = TypeVar("T")

CANCEL_AGAIN_S = 1.0


async def until(condition: Callable[[], bool], seconds: float, interval_s: float = 0.02) -> bool:
    """Wait for a condition that nobody signals; whether it came true in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(interval_s)
    return True


async def first_message(stream: AsyncIterator[T], timeout_s: float, what: str) -> T:
    """The message that must open a stream, in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream)
    except TimeoutError as error:
        raise Expired(
            f"the stream said nothing for {timeout_s:g} s; its first message must be {what}",
            field="first message",
            value="none",
            limit=f"{timeout_s:g} s",
        ) from error
    except StopAsyncIteration as error:
        raise InvalidRequest(f"the stream ended before its first message, {what}", field="first message") from error


def vital(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run a loop that the service cannot do without: should it ever end by an error, so does the process.

    Whoever watches it starts it again; to go on without would leave every stream hanging.
    """

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a vital loop has failed, leaving", loop=name, exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks until all of them have heard it."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def background(*tasks: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run tasks beside a block and end them with it.

    A library on the way may swallow a cancellation that comes together with a
    result (asyncio.wait_for in Python 3.11 does), so it is said again until
    it is heard.
    """
    running = [asyncio.create_task(task) for task in tasks]
    try:
        yield running
    finally:
        await cancel_all(running)
