"""Who is there to work, where what Redis says crosses what workers do."""

from __future__ import annotations

import asyncio
from typing import cast

from coordinator.persistence.store import Store
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_pool import WorkerPool
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo

DRAFTER = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))


class SlowStore:
    """Records at once, and answers a question with what was recorded when it was asked."""

    up = True

    def __init__(self) -> None:
        self.records: dict[str, WorkerInfo] = {}
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def put_worker(self, info: WorkerInfo, ttl_ms: int) -> None:
        self.records[info.worker_id] = info

    async def remove_worker(self, worker_id: str) -> None:
        self.records.pop(worker_id, None)

    async def workers(self, max_age_s: float) -> list[WorkerInfo]:
        found = list(self.records.values())
        self.asked.set()
        await self.answer.wait()
        return found


async def test_a_worker_that_left_does_not_come_back_from_an_older_record() -> None:
    store = SlowStore()
    roster = WorkerPool(cast(Store, store), 500, FleetKeys(), 10.0)
    await roster.admit(DRAFTER)
    looking = asyncio.create_task(roster.look())
    await store.asked.wait()
    await roster.left(DRAFTER.worker_id)
    store.answer.set()
    await looking
    assert not roster.links()
    store.records[DRAFTER.worker_id] = DRAFTER  # it reports to another coordinator now
    await roster.look()
    assert [link.info.worker_id for link in roster.links()] == [DRAFTER.worker_id]
    await roster.close()
