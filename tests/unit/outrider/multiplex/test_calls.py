"""Calls of a coordinator: a worker that reads too slowly is found out, however its sessions are carried."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from outrider.base.aio import until
from outrider.multiplex.calls import MAX_UNSENT, MAX_UNSENT_BYTES, MultiplexedCall, OwnCall
from outrider.multiplex.frames import WINDOW_BYTES, FrameQueue


def stuck() -> OwnCall:
    return OwnCall(SimpleNamespace(write=lambda message: asyncio.Event().wait(), cancel=lambda: None))


async def test_messages_that_a_worker_does_not_read_are_bounded() -> None:
    call = stuck()
    assert call.send(b"x" * 2 * MAX_UNSENT_BYTES), "the first one may be a long prompt"
    assert call.send(b"x" * MAX_UNSENT_BYTES)
    assert not call.send(b"x")
    await call.close()
    call = stuck()
    assert sum(call.send(b"") for _ in range(MAX_UNSENT + 9)) == MAX_UNSENT
    await call.close()


async def test_what_was_written_is_not_counted() -> None:
    async def write(message: bytes) -> None:
        await asyncio.sleep(0)

    call = OwnCall(SimpleNamespace(write=write, cancel=lambda: None))
    assert call.send(b"x")
    for _ in range(3):
        assert call.send(b"x" * MAX_UNSENT_BYTES)
        assert await until(lambda: not call._unsent_bytes, 5)
    await call.close()


async def test_the_same_holds_within_a_shared_stream() -> None:
    call = MultiplexedCall(1, {}, FrameQueue(), WINDOW_BYTES, 1 << 30)
    assert call.send(b"x" * 2 * MAX_UNSENT_BYTES), "the first one may be a long prompt"
    assert sum(call.send(b"") for _ in range(MAX_UNSENT + 9)) == MAX_UNSENT


async def test_a_call_of_its_own_that_is_closed_is_cancelled_and_writes_no_more() -> None:
    """It would stay open at the worker, with its session."""
    cancelled: list[bool] = []
    call = OwnCall(SimpleNamespace(write=lambda message: asyncio.Event().wait(), cancel=lambda: cancelled.append(True)))
    call.send(b"x")
    await asyncio.sleep(0)
    await call.close()
    assert cancelled == [True]
    assert call._writing.done()
