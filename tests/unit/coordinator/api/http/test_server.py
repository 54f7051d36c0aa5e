"""Connections that cannot be accepted."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import Any

import pytest

from coordinator.api.http.server import HttpServer
from outrider.security.credentials import Credentials
from outrider.settings.coordinator import CoordinatorSettings

ABORTED = ConnectionAbortedError(errno.ECONNABORTED, "the peer has gone")
NO_DESCRIPTOR = OSError(errno.EMFILE, "too many open files")


async def hello(_scope: dict[str, Any], _receive: object, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def seconds_until_answered(monkeypatch: pytest.MonkeyPatch, *errors: OSError) -> float:
    """Return the time that a request takes whose connection is accepted after these errors."""
    left = list(errors)
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept

    async def failing(listener: socket.socket) -> Any:
        if left:
            raise left.pop(0)
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", failing)
    settings = CoordinatorSettings(host="127.0.0.1", http_port=0)
    server = HttpServer(hello, settings, Credentials(settings))
    await server.start()
    started = time.monotonic()
    try:
        host, port = server.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    finally:
        await server.stop()
    assert not left
    return time.monotonic() - started


async def test_connections_that_their_peers_abort_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await seconds_until_answered(monkeypatch, *[ABORTED] * 5) < 2.0


async def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await seconds_until_answered(monkeypatch, NO_DESCRIPTOR) > 0.9


async def test_a_coordinator_that_starts_again_gets_its_port_at_once() -> None:
    """The system keeps connections that the one before has closed for a minute."""
    port = 0
    for _ in range(2):
        settings = CoordinatorSettings(host="127.0.0.1", http_port=port)
        server = HttpServer(hello, settings, Credentials(settings))
        await server.start()
        port = int(server.address.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 200"), "to its end: the server closes first"
        writer.close()
        await server.stop()
