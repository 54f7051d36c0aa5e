"""Steps of a loop: one at a time, in the context of the loop, and an error ends it."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from contextvars import ContextVar

import pytest

from outrider.base.aio import until
from outrider.base.step_loop import Step, StepLoop, StepThread

CALLER: ContextVar[str] = ContextVar("caller", default="")


class Doubling(StepLoop):
    """Doubles the numbers that it has, all of them in one step."""

    def __init__(self) -> None:
        super().__init__(StepThread("doubling"))
        self.numbers: list[int] = []
        self.results: list[tuple[list[int], str]] = []
        self.released = threading.Event()
        self.taken = asyncio.Event()

    def compose(self) -> Step | None:
        given, self.numbers = self.numbers, []
        return (lambda: self._double(given), self._take) if given else None

    def _double(self, given: list[int]) -> list[int]:
        assert self.released.wait(5)
        return [2 * number for number in given if number or 1 / number]

    def _take(self, result: list[int] | BaseException) -> None:
        if isinstance(result, BaseException):
            raise ValueError("a step failed") from result
        self.results.append((result, CALLER.get()))
        self.taken.set()


async def test_what_comes_during_a_step_is_in_the_next_one() -> None:
    loop = Doubling()
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0.01)
    CALLER.set("a session")
    for number in (1, 2, 3):
        loop.numbers.append(number)
        loop.wake_now()
    loop.wake()
    loop.released.set()
    while len(loop.results) < 2:
        loop.taken.clear()
        await asyncio.wait_for(loop.taken.wait(), 5)
    assert loop.results == [([2], ""), ([4, 6], "")], "not with the log fields of the session that has woken it"
    running.cancel()
    loop.thread.stop()


async def test_a_loop_that_runs_again_computes_one_step_at_a_time() -> None:
    """It was idle when it was stopped. Woken at its next start, it composed a second step beside the first one."""
    loop = Doubling()
    for _ in range(2):
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    loop.numbers += 1, 2
    asyncio.get_running_loop().call_soon(lambda: loop.numbers.append(3))
    loop.wake()
    await asyncio.sleep(0.01)
    assert loop.numbers == [3], "they wait for the step that is computed"
    loop.released.set()
    assert await until(lambda: len(loop.results) == 2, 5)
    assert [result for result, _ in loop.results] == [[2, 4], [6]]
    running.cancel()
    loop.thread.stop()


async def test_it_wakes_at_the_earliest_of_several_times() -> None:
    loop = Doubling()
    loop.released.set()
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    loop.wake_in(60.0)
    loop.wake_in(0.01)
    loop.wake_in(30.0)
    loop.numbers.append(4)
    await asyncio.wait_for(loop.taken.wait(), 5)
    assert loop.results[0][0] == [8]
    running.cancel()
    loop.thread.stop()


async def test_an_error_of_what_takes_a_result_ends_it() -> None:
    loop = Doubling()
    loop.released.set()
    loop.numbers.append(0)
    with pytest.raises(ValueError, match="a step failed"):
        await asyncio.wait_for(loop.run(), 5)
    loop.thread.stop()


class PanicException(BaseException):
    """What Rust code raises in a panic: no Exception."""


async def test_a_panic_in_a_step_ends_it_and_leaves_the_thread() -> None:
    class Panicking(Doubling):
        def _double(self, given: list[int]) -> list[int]:
            raise PanicException

    loop = Panicking()
    loop.numbers.append(1)
    with pytest.raises(ValueError, match="a step failed"):
        await asyncio.wait_for(loop.run(), 5)
    goes_on = threading.Event()
    loop.thread.submit(goes_on.set)
    assert goes_on.wait(5)
    loop.thread.stop()


async def test_a_panic_on_the_event_loop_ends_it() -> None:
    class Panicking(Doubling):
        def compose(self) -> Step | None:
            raise PanicException

    loop = Panicking()
    with pytest.raises(PanicException):
        await asyncio.wait_for(loop.run(), 5)
    loop.thread.stop()


async def test_an_idle_thread_keeps_nothing_of_the_last_step() -> None:
    class Batch:
        def compute(self) -> None:
            """Do what a step does."""

    thread = StepThread("idle")
    thread.start()
    batch = Batch()
    held = weakref.ref(batch)
    thread.submit(batch.compute)
    del batch
    assert await until(lambda: held() is None, 5)
    thread.stop()


def test_a_thread_that_was_stopped_is_not_kept() -> None:
    thread = StepThread("stopped")
    thread.start()
    held = weakref.ref(thread)
    thread.stop()
    del thread
    assert held() is None


def test_a_process_that_ends_waits_for_the_step_that_is_computed() -> None:
    """Without a stop, as after an error: torch would abort the process."""
    lines = (
        "import time",
        "from outrider.base.step_loop import StepThread",
        "thread = StepThread('ending')",
        "thread.start()",
        "thread.submit(lambda: (time.sleep(0.3), print('computed', flush=True)))",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (0, "computed\n")


async def test_a_step_that_failed_leaves_nothing_to_the_collector_of_garbage() -> None:
    """Its error kept the sessions of its step, with their caches on a device: collections are rare there."""

    class Batch:
        def compute(self) -> None:
            raise ValueError("a step failed")

    class Failing(StepLoop):
        def __init__(self, batch: Batch) -> None:
            super().__init__(StepThread("failing"))
            self.batches, self.errors = [batch], list[str]()

        def compose(self) -> Step | None:
            return (self.batches.pop().compute, lambda error: self.errors.append(str(error))) if self.batches else None

    batch = Batch()
    held, loop = weakref.ref(batch), Failing(batch)
    del batch
    gc.disable()
    try:
        running = asyncio.create_task(loop.run())
        assert await until(lambda: bool(loop.errors), 5)
        assert await until(lambda: held() is None, 5)
    finally:
        gc.enable()
    assert loop.errors == ["a step failed"]
    running.cancel()
    loop.thread.stop()
