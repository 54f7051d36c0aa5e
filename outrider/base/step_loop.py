"""Loop of a worker's steps: composed on the event loop, computed in a thread, one after the other.

It runs in callbacks: a task would wait for another turn of the event loop at each hand-over.
"""

from __future__ import annotations

import asyncio
import atexit
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

# What the thread computes, and what takes its result or its error.
Step = tuple[Callable[[], Any], Callable[[Any], None]]


class StepThread(Thread):
    """Thread in which steps are computed, in order. An executor takes far longer to hand them over and back."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.submit = self._queue.put
        atexit.register(self.stop)  # torch aborts a process that ends in the middle of a step

    def run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # it has the sessions of its step

    def stop(self) -> None:
        """End the thread after all that was submitted."""
        atexit.unregister(self.stop)  # it would keep the thread
        self.submit(None)
        if self.ident is not None:
            self.join()


class StepLoop(ABC):
    """Steps of all sessions. An error of `compose`, or of what takes a result, ends it."""

    def __init__(self, thread: StepThread) -> None:
        self.thread = thread
        self._idle = False  # it runs, and has nothing to compute
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def compose(self) -> Step | None:
        """Return the next step; None if there is nothing to compute before the loop is woken."""

    async def run(self) -> None:
        """Run steps in this context: that of a session has its log fields."""
        self._events, self._context = asyncio.get_running_loop(), copy_context()
        self._idle, self._ended = False, self._events.create_future()
        if self.thread.ident is None:
            self.thread.start()
        self._events.call_soon(self._turn, self._ended)
        await self._ended

    def wake(self) -> None:
        """Compose a step soon, unless one is computed."""
        if self._idle:
            self._idle = False
            self._events.call_soon(self._turn, self._ended, context=self._context)

    def wake_now(self) -> None:
        """Compose a step at once, unless one is computed: the caller has handed over all that it has."""
        if self._idle:
            self._context.run(self._turn, self._ended)

    def wake_in(self, seconds: float) -> None:
        """Wake then or before."""
        now = self._events.time()
        if self._timer is None or not now < self._timer.when() <= now + seconds:
            self._timer = self._events.call_at(now + seconds, self.wake, context=self._context)

    def _turn(self, ended: asyncio.Future[None], take: Callable[[], None] = lambda: None) -> None:
        """Take what came of a step, if any, and begin the next one."""
        if ended.done():
            return
        self._idle = False
        try:
            take()
            step = self.compose()
        except BaseException as error:
            ended.set_exception(error)
            return
        self._idle = step is None
        if step is not None:
            self.thread.submit(partial(self._compute, ended, *step))

    def _compute(self, ended: asyncio.Future[None], compute: Callable[[], Any], take: Callable[[Any], None]) -> None:
        try:
            taken = partial(take, compute())
        except BaseException as error:  # such as a panic in Rust: a thread that ends would leave the loop waiting
            taken = partial(take, error)
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(self._turn, ended, taken, context=self._context)
        del taken  # an error's traceback keeps this frame: a cycle
