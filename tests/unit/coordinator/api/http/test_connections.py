"""Clients that do not read a response: their connection is cut off, however little of it waits in the buffer."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest
import pytest_asyncio
from uvicorn import Config
from uvicorn.server import ServerState

from coordinator.api.http.connections import Connection, Connections
from outrider.base.aio import until

SMALL = 4096  # bytes that the sockets hold, about
REQUEST = b"GET /%d HTTP/1.1\r\nHost: here\r\n\r\n"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer with as many bytes as the path says."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * int(scope["path"][1:])})


@pytest.fixture
def timeout_s() -> float:
    """How long a response may wait to be read."""
    return 0.6


@pytest_asyncio.fixture
async def client(timeout_s: float) -> AsyncIterator[socket.socket]:
    """A client of a server that limits the time to read."""
    config, state = Config(app, lifespan="off", log_config=None), ServerState()
    config.load()

    connections = Connections(1)

    def connection() -> Connection:
        return Connection(connections, 10 * timeout_s, timeout_s, config=config, server_state=state, app_state={})

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
    hung_up = select.poll()
    hung_up.register(client, 0)
    assert await until(lambda: bool(hung_up.poll(0)), 10)
    with pytest.raises(ConnectionResetError):
        await read(client, size)


@pytest.mark.parametrize("timeout_s", [60.0])
async def test_who_reads_late_may_ask_again(
    client: socket.socket, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to read one response does not end the next one."""
    loop, skipped = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + skipped)
    for _ in range(3):
        await loop.sock_sendall(client, REQUEST % 50_000)
        await asyncio.sleep(0.06)
        assert await asyncio.wait_for(read(client, 50_000), 5.0) >= 50_000
    skipped = 2 * timeout_s
    await asyncio.sleep(0.06)
    await loop.sock_sendall(client, REQUEST % 10)
    assert await asyncio.wait_for(read(client, 10), 5.0) >= 10, "nothing was left to read: the connection is open"


@pytest.mark.parametrize(
    ("timeout_s", "part", "whole"), [(2.0, 10_000, True), (0.6, 500, False)], ids=["steadily", "a trickle"]
)
async def test_who_reads_slowly_gets_all_of_it(client: socket.socket, timeout_s: float, part: int, whole: bool) -> None:
    """As long as it takes bytes as fast as bodies must come."""
    size, loop = 200_000, asyncio.get_running_loop()
    await loop.sock_sendall(client, REQUEST % size)
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while received < size:
            received += await read_once(client, part)
            await asyncio.sleep(0.08 if whole else timeout_s / 4)
    assert (received >= size) is whole


async def read_once(client: socket.socket, most: int) -> int:
    return len(await asyncio.get_running_loop().sock_recv(client, most))


@pytest.mark.parametrize("timeout_s", [60.0])
async def test_a_new_connection_ends_no_answer_that_is_still_being_read(client: socket.socket) -> None:
    """It gets the place of one that has nothing left to read."""
    loop, address = asyncio.get_running_loop(), client.getpeername()
    await loop.sock_sendall(client, REQUEST % 50_000)
    received = await read_once(client, 1)
    reader, writer = await asyncio.open_connection(*address)
    assert (await asyncio.wait_for(reader.read(), 5.0)).startswith(b"HTTP/1.1 503 ")
    assert received + await read(client, 50_000) >= 50_000
    writer.close()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(REQUEST % 10)
    assert (await asyncio.wait_for(reader.read(100), 5.0)).startswith(b"HTTP/1.1 200 ")
    writer.close()


def held(connections: Connections, *, known: bool = False, busy: bool = False, handshake: bool = False) -> Any:
    """Return a connection that was let in and, unless it is busy, waits for a request."""
    opening = Mock() if handshake else None
    made: Any = Mock(spec=["known", "opening", "sending", "transport"], known=known, opening=opening, sending=False)
    assert connections.enter(made)
    if not busy:
        connections.idle(made)
    return made


def test_new_connections_replace_idle_ones_strangers_first_and_each_a_different_one() -> None:
    """The system tells of a closed connection only later."""
    connections = Connections(5)
    known, busy, stranger = held(connections, known=True), held(connections, known=True), held(connections)
    late, opening = held(connections), held(connections, handshake=True)
    connections.busy(busy)
    held(connections, busy=True)
    assert stranger.transport.abort.called, "the one that is idle for longest"
    assert not late.transport.abort.called
    held(connections, busy=True)
    held(connections, busy=True)
    assert late.transport.abort.called
    assert opening.opening.cancel.called
    assert not known.transport.abort.called
    held(connections, busy=True)
    assert known.transport.abort.called
    assert not connections.enter(Mock()), "all are busy"
    assert connections.enter(busy), "it is in already"
    connections.leave(busy)
    held(connections, busy=True)
    assert not busy.transport.abort.called


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_an_offer_to_change_the_protocol_is_passed_over(
    client: socket.socket, caplog: pytest.LogCaptureFixture, protocol: bytes
) -> None:
    """Java's HttpClient offers h2c with each request that has no TLS. The log told users to install a library."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n\r\n" % protocol
    for _ in range(2):
        await asyncio.get_running_loop().sock_sendall(client, (REQUEST % 10).removesuffix(b"\r\n") + offer)
        assert await asyncio.wait_for(read(client, 10), 5.0) >= 10
    assert not caplog.records
