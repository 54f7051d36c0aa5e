"""Where requests are read: beside the event loop, and huge ones one after the other."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from coordinator.api.preprocess import HUGE_BYTES, beside
from outrider.security.tenants import Tenant, set_tenant, tenant


@pytest.mark.parametrize(("size", "most"), [(HUGE_BYTES, 3), (HUGE_BYTES + 1, 1)])
async def test_huge_requests_take_their_memory_one_after_the_other(size: int, most: int) -> None:
    together, seen, lock, all_there = 0, [], threading.Lock(), threading.Barrier(most)

    def work(name: str) -> str:
        nonlocal together
        with lock:
            together += 1
            seen.append(together)
        all_there.wait(10)
        time.sleep(0.05)
        with lock:
            together -= 1
        return f"{name} of {tenant().id}"

    set_tenant(Tenant("alice"))
    assert await asyncio.gather(*(beside(size, work, name) for name in "abc")) == [f"{it} of alice" for it in "abc"]
    assert max(seen) == most
