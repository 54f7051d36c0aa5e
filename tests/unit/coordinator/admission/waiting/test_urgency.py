"""Priority class and deadline of a request: what is accepted, and from whom."""

from __future__ import annotations

import asyncio
import math
import time
from contextvars import copy_context

import pytest

from coordinator.admission.waiting.urgency import Urgency, set_urgency, timeout_of, urgency
from outrider.protocol.errors import Expired, InvalidRequest
from outrider.security.tenants import NO_TENANT, Tenant, TenantLimits, set_tenant

BATCH = Tenant("batch", TenantLimits(priority=5))
STAFF = Tenant("staff", TenantLimits(priority=0, best_priority=-10))
PLAIN = Tenant("plain")


def class_of(tenant: Tenant, named: int | None) -> int | str:
    def call() -> int | str:
        set_tenant(tenant)
        try:
            set_urgency(named, None)
        except InvalidRequest as error:
            return error.limit
        return urgency().priority

    return copy_context().run(call)


@pytest.mark.parametrize(
    ("tenant", "named", "expected"),
    [
        (NO_TENANT, None, 0),
        (NO_TENANT, -100, -100),
        (NO_TENANT, 101, "in [-100, 100]"),
        (PLAIN, None, 0),
        (PLAIN, 3, 3),
        (PLAIN, -1, "in [0, 100]"),
        (BATCH, None, 5),
        (BATCH, 4, "in [5, 100]"),
        (BATCH, 9, 9),
        (STAFF, None, 0),
        (STAFF, -10, -10),
        (STAFF, -11, "in [-10, 100]"),
    ],
)
def test_a_key_has_a_class_and_a_best_one(tenant: Tenant, named: int | None, expected: int | str) -> None:
    assert class_of(tenant, named) == expected


def test_a_call_that_sets_nothing_has_its_key_s_class() -> None:
    def call() -> Urgency:
        set_tenant(BATCH)
        return urgency()

    assert copy_context().run(call) == Urgency(5, math.inf)


FORMS = [
    ("30", 30.0),
    ("0.25", 0.25),
    (".5", 0.5),
    ("5.", 5.0),
    ("+7", 7.0),
    ("1.5E+2", 150.0),
    ("1e-3", 0.001),
    ("86400", 86_400.0),
]


@pytest.mark.parametrize(("header", "seconds"), FORMS)
def test_a_timeout_is_a_number_of_seconds(header: str, seconds: float) -> None:
    assert timeout_of(header) == seconds


def test_without_the_header_there_is_none() -> None:
    assert timeout_of(None) is None


WORDS = ("nan", "NaN", "inf", "-inf", "Infinity", "soon", "", " 5", "5 s", "5, 6", "1_0", "0x10", "１")


@pytest.mark.parametrize(
    "header", [*WORDS, "0", "-1", "-0.0", "86401", "1e400", "1e-400", "9" * 5000, "1" * 400 + ".5"]
)
def test_other_timeouts_are_refused_by_name(header: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        timeout_of(header)
    assert refused.value.field == "X-Request-Timeout"


@pytest.mark.parametrize("end", ["x", ".x", "e", "e1x"])
def test_a_long_header_is_refused_at_once(end: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest):
        timeout_of("1" * 200_000 + end)
    assert time.process_time() - start < 1


async def test_who_waits_at_the_deadline_is_told_and_who_gets_something_is_not() -> None:
    set_urgency(None, 0.01)
    changed = asyncio.Event()
    with pytest.raises(Expired, match="until its deadline"):
        await urgency().wait(changed)
    changed.set()
    set_urgency(None, 10)
    await urgency().wait(changed)
    set_urgency(None, None)
    await urgency().wait(changed)
