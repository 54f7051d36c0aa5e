"""The byte budget gives memory back to the system after the last request was freed."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.admission import byte_budget
from coordinator.admission.byte_budget import UNCOUNTED, ByteBudget
from outrider.base.aio import until
from outrider.protocol.errors import InvalidRequest, Overloaded

TRIM_AFTER_S = 0.05


async def test_memory_that_was_freed_after_a_timer_was_set_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC frees a message some time after its call: one timer for several calls comes too early for the last."""
    trims: list[float] = []
    monkeypatch.setattr(byte_budget, "TRIM_AFTER_S", TRIM_AFTER_S)
    monkeypatch.setattr(byte_budget, "trim", lambda: trims.append(asyncio.get_running_loop().time()))
    budget = ByteBudget(100)
    with budget.share() as share:
        budget.take(share, UNCOUNTED + 100)
        with budget.share() as other, pytest.raises(Overloaded):
            budget.take(other, UNCOUNTED + 1)
        await asyncio.sleep(TRIM_AFTER_S / 2)
        freed = asyncio.get_running_loop().time()
    assert await until(lambda: budget._trimming is None, 5), "it is quiet in the end"
    assert trims[-1] - freed >= 0.9 * TRIM_AFTER_S


async def test_a_request_beyond_the_budget_is_not_to_be_tried_again() -> None:
    budget = ByteBudget(100)
    with budget.share() as share, pytest.raises(InvalidRequest, match="request is over 100 bytes"):
        budget.take(share, UNCOUNTED + 101)
    with budget.share() as first, budget.share() as share:
        budget.take(first, UNCOUNTED + 60)
        with pytest.raises(Overloaded, match="requests of 60 bytes are being read") as beside:
            budget.take(share, UNCOUNTED + 60)
    assert beside.value.retry_after_ms == 1000


async def test_a_request_counts_once_while_it_grows() -> None:
    budget = ByteBudget(100)
    with budget.share() as share, budget.share() as other:
        for size in (10, 50, 60):
            budget.take(share, UNCOUNTED + size)
        budget.take(other, UNCOUNTED + 40)
        with pytest.raises(Overloaded):
            budget.take(other, UNCOUNTED + 41)
