"""The connection to Redis: what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest
from structlog.testing import capture_logs

from coordinator.persistence.redis_connection import RedisConnection, StoreDown
from outrider.base.aio import until
from outrider.protocol.errors import StartupError


class StalledRedis:
    """Answers nothing on its first connection and everything on later ones; counts those that are open."""

    def __init__(self) -> None:
        self.open = 0
        self.ever = 0
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.ever += 1
        answers = self.ever > 1
        try:
            while data := await reader.read(1024):
                self.asked.set()
                if answers:
                    writer.write(b"+PONG\r\n" * len(re.findall(rb"(?m)^\*\d", data)))
        finally:
            self.open -= 1
            writer.close()


async def test_a_call_under_way_at_the_end_leaves_no_connection() -> None:
    stalled = StalledRedis()
    server = await asyncio.start_server(stalled.serve, "127.0.0.1", 0)
    connection = RedisConnection(
        f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", lambda _record, _reason: None
    )
    call = asyncio.create_task(connection.ping())
    await asyncio.wait_for(stalled.asked.wait(), 5)
    await connection.close()
    with contextlib.suppress(StoreDown):
        await call
    with pytest.raises(StoreDown):
        await connection.ping()
    opened = stalled.ever
    assert await until(lambda: stalled.open == 0, 5)
    await asyncio.sleep(0.1)
    assert stalled.ever == opened, "it connected again after it was closed"
    server.close()


async def test_a_primary_that_became_a_replica_is_left_for_the_one_behind_its_address() -> None:
    """It keeps the connections that it has, and refuses every write on them."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        former = connections == 1
        while data := await reader.read(1024):
            refused = former and b"\r\nSET\r\n" in data
            writer.write(b"-READONLY a replica\r\n" if refused else b"+OK\r\n" * len(re.findall(rb"(?m)^\*\d", data)))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0?protocol=2"
    connection = RedisConnection(url, lambda _record, _reason: None)
    async with connection.calling():
        assert await connection.client.set("name", "value")
    assert connections == 2
    await connection.close()
    server.close()


async def test_a_node_of_a_cluster_is_told_from_a_redis_that_is_down() -> None:
    """It answers for some keys and names another node for the others: `3999 127.0.0.1:6381` alone tells nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            moved = b"\r\nSET\r\n" in data
            writer.write(
                b"-MOVED 3999 127.0.0.1:6381\r\n" if moved else b"+OK\r\n" * len(re.findall(rb"(?m)^\*\d", data))
            )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0?protocol=2"
    connection = RedisConnection(url, lambda *_: None)
    with capture_logs() as lines, pytest.raises(StoreDown, match="MovedError: 3999"):
        await connection.ping()
    assert "MovedError" in lines[0]["error"]
    await connection.close()
    server.close()


async def test_an_unreachable_redis_is_logged_once_also_at_the_start() -> None:
    connection = RedisConnection("redis://127.0.0.1:1/0", lambda _record, _reason: None)
    with capture_logs() as lines:
        for _ in range(2):
            with pytest.raises(StoreDown):
                await connection.ping()
    await connection.close()
    assert [line["event"] for line in lines] == ["redis is down"]


@pytest.mark.parametrize("url", ["garbage", "redis://:secret@host:port/0"])
async def test_a_url_that_is_none_is_told_in_a_sentence_without_its_password(url: str) -> None:
    with pytest.raises(StartupError, match="redis_url is no URL of Redis") as caught:
        RedisConnection(url, lambda *_: None)
    assert "secret" not in caught.value.message
