"""Asyncio helpers: wait for a condition, run background tasks, end the process when a critical task fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

import grpc
import structlog

from outrider.protocol.errors import Expired, InvalidRequest

log = structlog.get_logger(__name__)

LARGE_BYTES = 16 * 1024
HUGE_BYTES = 512 * 1024
_FOR_HUGE = ThreadPoolExecutor(1, "huge requests")
T = TypeVar("T")
Call = grpc.aio.ServicerContext[Any, Any]  # as its handler sees it
Continuation = Callable[[Any], Awaitable[Any]]  # of an interceptor: what returns the handler of a call

CANCEL_AGAIN_S = 1.0


async def until(condition: Callable[[], bool], seconds: float, interval_s: float = 0.02) -> bool:
    """Poll a condition; return whether it became true in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(interval_s)
    return True


async def beside(size: int, work: Callable[..., T], *given: Any, thread: ThreadPoolExecutor | None = None) -> T:
    """Run work on a large request beside the event loop, on huge ones one at a time: 4 MiB take a GiB to tokenise."""
    if size < LARGE_BYTES:
        return work(*given)
    thread = _FOR_HUGE if size > HUGE_BYTES else thread
    return await asyncio.get_running_loop().run_in_executor(thread, copy_context().run, work, *given)


class WriteTimer:
    """Timeout of the writes of one stream, by one timer for all of them."""

    def __init__(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.timeout, self.now, self._seconds = asyncio.timeout(None), loop.time, seconds
        self.began: float | None = None  # the write in progress
        self.handle = loop.call_later(seconds, self._check)

    def _check(self) -> None:
        over_at = (self.began or self.now()) + self._seconds
        if over_at <= self.now():
            self.timeout.reschedule(over_at)
        else:
            self.handle = asyncio.get_running_loop().call_at(over_at, self._check)


async def first_message(stream: AsyncIterator[T], timeout_s: float, what: str) -> T:
    """Return the first message of a stream, or raise Expired."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream)
    except TimeoutError as error:
        message = f"no message on the stream for {timeout_s:g} s; its first message must be {what}"
        raise Expired(message, field="first message", value="none", limit=f"{timeout_s:g} s") from error
    except StopAsyncIteration as error:
        raise InvalidRequest(f"the stream ended before its first message, {what}", field="first message") from error


FAILED: list[str] = []  # critical tasks of this process


def critical_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run a loop that the service depends on; an error in it ends the process: else every stream would hang."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("critical task failed, shutting down", loop=name, exc_info=error)
            FAILED.append(name)
            os.kill(os.getpid(), signal.SIGTERM)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended: a library may swallow a cancellation (asyncio.wait_for in Python 3.11, gRPC).

    None outlives a caller that is cancelled meanwhile.
    """
    pending, interrupted = set(tasks), False
    while pending:
        for task in pending:
            task.cancel()
        try:
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError:
            interrupted = True
    await asyncio.gather(*tasks, return_exceptions=True)
    if interrupted:
        raise asyncio.CancelledError


@contextlib.asynccontextmanager
async def background(*tasks: Coroutine[Any, Any, object]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run tasks for the duration of a block."""
    running = [asyncio.create_task(task) for task in tasks]
    try:
        yield running
    finally:
        await cancel_all(running)
