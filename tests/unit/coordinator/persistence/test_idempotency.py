"""Idempotency keys at several coordinators: they hold equally long at all of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.persistence import idempotency
from coordinator.persistence.idempotency import IdempotencyKeys
from coordinator.persistence.session_record import SessionRequest
from outrider.protocol.errors import Conflict
from outrider.protocol.sampling_params import SamplingParams

TTL_S = 3600.0
REQUEST = SessionRequest((1, 2), SamplingParams(seed=1))


class SharedStore:
    """What Redis does with keys."""

    def __init__(self) -> None:
        self.now = 0.0
        self._held: dict[str, tuple[str, float]] = {}

    async def reserve(self, name: str, value: str) -> tuple[str, float] | None:
        held, until = self._held.get(name, ("", 0.0))
        if until > self.now:
            return held, until - self.now
        self._held[name] = value, self.now + TTL_S
        return None


async def test_a_key_ends_everywhere_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one coordinator would tell the new answer, and one that was asked late the old one for another hour."""
    store: Any = SharedStore()
    monkeypatch.setattr(idempotency, "time", SimpleNamespace(monotonic=lambda: store.now))
    one, other = (IdempotencyKeys(store, TTL_S, ()) for _ in range(2))
    found = []
    for store.now, keys, new in ((0.0, one, "a"), (3500.0, other, "b"), (3601.0, one, "c"), (3602.0, other, "d")):
        found.append(await keys.reserve("key", new, REQUEST))
    assert found == ["a", "a", "c", "c"]


async def test_a_key_holds_as_long_as_its_session_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a retry of a request that takes longer than keys are kept would start it again beside itself."""
    store: Any = SharedStore()
    monkeypatch.setattr(idempotency, "time", SimpleNamespace(monotonic=lambda: store.now))
    running = {"a"}
    keys = IdempotencyKeys(store, TTL_S, running)
    assert await keys.reserve("key", "a", REQUEST) == "a"
    store.now = 2 * TTL_S
    assert "key" in keys
    assert await keys.reserve("key", "b", REQUEST) == "a"
    running.clear()
    assert "key" not in keys
    assert await keys.reserve("key", "c", REQUEST) == "c"


SENT = replace(REQUEST, sent="as-sent")
READ_OTHERWISE = replace(SENT, params=SamplingParams(seed=1, max_tokens=99))


@pytest.mark.parametrize(
    ("first", "retry", "same"),
    [
        (SENT, READ_OTHERWISE, True),  # an upgrade, or a setting that changed
        (SENT, replace(REQUEST, sent="streamed-now"), True),  # which a coordinator reads alike
        (SENT, replace(READ_OTHERWISE, sent="another"), False),
        (REQUEST, SENT, True),  # the first at an older version, which stores no digest of what was sent
        (SENT, REQUEST, True),
        (REQUEST, READ_OTHERWISE, False),
    ],
)
async def test_a_retry_is_the_same_request_as_sent_or_as_read(
    first: SessionRequest, retry: SessionRequest, same: bool
) -> None:
    store: Any = SharedStore()
    for keys in (IdempotencyKeys(store, TTL_S, ()) for _ in range(2)):
        assert await keys.reserve("key", "a", first) == "a"
        if same:
            assert await keys.reserve("key", "b", retry) == "a"
        else:
            with pytest.raises(Conflict):
                await keys.reserve("key", "b", retry)


async def test_a_redis_that_is_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(idempotency, "_RESERVE_S", 0.01)
    store: Any = SimpleNamespace(reserve=never)
    with capture_logs() as lines:
        assert await IdempotencyKeys(store, TTL_S, ()).reserve("key", "a", REQUEST) == "a"
    assert [line["error"] for line in lines] == ["no answer in 0.01 s"]
