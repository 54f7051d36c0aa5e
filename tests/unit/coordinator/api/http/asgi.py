"""Requests to ASGI applications without a server."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Scope


async def sent_by(app: ASGIApp, **scope: object) -> list[Message]:
    """Return what an application sends to a GET without a body, of / unless the scope says otherwise."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asked: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await app(asked | scope, receive, send)
    return sent
