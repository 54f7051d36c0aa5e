"""Clients that do not read a response: their connection is cut off, however little of it waits in the buffer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from uvicorn import Config
from uvicorn.server import ServerState

from coordinator.api.http.connections import Connection, Connections

SMALL = 4096  # bytes that the sockets hold, about
TIMEOUT_S = 0.6
REQUEST = b"GET /%d HTTP/1.1\r\nHost: here\r\n\r\n"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer with as many bytes as the path says."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * int(scope["path"][1:])})


@pytest_asyncio.fixture
async def client() -> AsyncIterator[socket.socket]:
    """A client of a server that limits the time to read."""
    config, state = Config(app, lifespan="off", log_config=None), ServerState()
    config.load()

    def connection() -> Connection:
        return Connection(Connections(4), 5.0, TIMEOUT_S, config=config, server_state=state, app_state={})

    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    listening.bind(("127.0.0.1", 0))
    server = await asyncio.get_running_loop().create_server(connection, sock=listening)
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, listening.getsockname())
        yield made
    server.close()
    await server.wait_closed()


async def read(client: socket.socket, size: int) -> int:
    """Read until so many bytes, the head of the response included, or the end; return their number."""
    loop, found = asyncio.get_running_loop(), 0
    while found < size and (part := await loop.sock_recv(client, 65536)):
        found += len(part)
    return found


@pytest.mark.parametrize("size", [50_000, 500_000], ids=["complete", "too much for the buffer"])
async def test_who_does_not_read_is_cut_off(client: socket.socket, size: int) -> None:
    await asyncio.get_running_loop().sock_sendall(client, REQUEST % size)
    await asyncio.sleep(2 * TIMEOUT_S)
    with pytest.raises(ConnectionResetError):
        await read(client, size)


async def test_who_reads_late_may_ask_again(client: socket.socket) -> None:
    """The time to read one response does not end the next one."""
    for _ in range(3):
        await asyncio.get_running_loop().sock_sendall(client, REQUEST % 50_000)
        await asyncio.sleep(TIMEOUT_S / 10)
        assert await asyncio.wait_for(read(client, 50_000), 5.0) >= 50_000
    await asyncio.sleep(2 * TIMEOUT_S)
    await asyncio.get_running_loop().sock_sendall(client, REQUEST % 10)
    assert await asyncio.wait_for(read(client, 10), 5.0) >= 10, "nothing was left to read: the connection is open"
