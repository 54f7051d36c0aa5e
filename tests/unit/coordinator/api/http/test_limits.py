"""Bodies within the coordinator's limits of memory."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from coordinator.admission.byte_budget import UNCOUNTED, ByteBudget
from coordinator.api.http.limits import BodyReader, KeyAuth, RequestIds
from outrider.base import aio
from outrider.observability.metrics import CoordinatorMetrics
from outrider.security.api_keys import ApiKeys
from tests.unit.coordinator.api.http.asgi import sent_by

_CHUNK = bytes(UNCOUNTED)


async def _status(budget: ByteBudget, chunks: int) -> int:
    """Return the status that a body of so many chunks gets."""
    left = chunks
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert len((await receive())["body"]) == chunks * len(_CHUNK)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        nonlocal left
        if not left:
            await asyncio.Event().wait()  # the client stays
        left -= 1
        return {"type": "http.request", "body": _CHUNK, "more_body": left > 0}

    async def send(message: Message) -> None:
        sent.append(message)

    reader = BodyReader(app, 8 * len(_CHUNK), timeout_s=5.0, budget=budget)
    await reader({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_a_body_beyond_the_budget_is_not_to_be_tried_again() -> None:
    budget = ByteBudget(2 * len(_CHUNK))
    assert await _status(budget, 3) == 200
    assert await _status(budget, 5) == 413, "it never fits, however few others are read"


async def test_a_body_waits_for_the_others() -> None:
    metrics = CoordinatorMetrics()
    budget = ByteBudget(2 * len(_CHUNK), metrics.count_refusals)
    with budget.share() as other:
        budget.take(other, UNCOUNTED + budget.limit)
        assert await _status(budget, 3) == 503
    assert await _status(budget, 3) == 200
    counted = metrics.registry.get_sample_value
    assert counted("outrider_requests_refused_total", {"code": "overloaded"}) == 1
    assert counted("outrider_requests_refused_by_limit_total", {"limit": "request"}) == 1


@pytest.mark.parametrize(
    ("path", "key", "other", "status"),
    [
        *(("/v1/models", b"", b"", 401), ("/v1/models", b"Bearer k", b"", 200), ("/health", b"", b"", 200)),
        *(("/v1/models", b"", b"k", 200), ("/v1/models", b"", b"Bearer k", 401), ("/v1/models", b"Bearer", b"k", 401)),
    ],
)
async def test_a_request_without_a_key_is_challenged(path: str, key: bytes, other: bytes, status: int) -> None:
    """As HTTP wants it: some clients send a key only then."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    headers = [(b"authorization", key), (b"x-api-key", other)]
    sent = await sent_by(KeyAuth(app, ApiKeys(["k"]), frozenset({"/health"})), path=path, headers=headers)
    assert sent[0]["status"] == status
    assert dict(sent[0]["headers"]).get(b"www-authenticate") == (b"Bearer" if status == 401 else None)


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        *(("/metrics", 200, "debug"), ("/metrics", 401, "info"), ("/v1/models", 200, "info")),
        *(("/health", 200, "debug"), ("/ready", 200, "debug"), ("/ready", 503, "info")),
    ],
)
async def test_what_is_polled_is_no_event_of_the_log(path: str, status: int, level: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})

    with capture_logs() as lines:
        await sent_by(RequestIds(app), path=path)
    assert [(line["event"], line["status"], line["log_level"]) for line in lines] == [("http", status, level)]


async def test_an_answer_ends_with_its_client_although_a_library_swallows_the_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As redis-py, which sends within asyncio.wait_for: in Python 3.11 that returns what it has instead."""
    monkeypatch.setattr(aio, "CANCEL_AGAIN_S", 0.01)
    asked = asyncio.Event()
    messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()  # the answer

    async def receive() -> Message:
        if len(messages) == 1:
            await asked.wait()
        return messages.pop(0)

    async def send(message: Message) -> None:
        pass

    reader = BodyReader(app, 8 * len(_CHUNK), timeout_s=5.0, budget=ByteBudget(len(_CHUNK)))
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    reading = asyncio.ensure_future(reader(scope, receive, send))
    try:
        await asyncio.wait({reading}, timeout=2)
        assert reading.done()
    finally:
        reading.cancel()
