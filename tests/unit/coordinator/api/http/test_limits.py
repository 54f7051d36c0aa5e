"""Bodies within the coordinator's limits of memory."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from coordinator.admission.byte_budget import UNCOUNTED, ByteBudget
from coordinator.api.http.limits import BodyReader

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
    budget = ByteBudget(2 * len(_CHUNK))
    with budget.share() as other:
        budget.take(other, UNCOUNTED + budget.limit)
        assert await _status(budget, 3) == 503
    assert await _status(budget, 3) == 200
