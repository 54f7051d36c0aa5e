"""Clients that do not read: their sessions end as soon as they are generated, and they are not waited for long."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until as soon
from outrider.base.grpc_options import channel_options
from outrider.client.aio import AsyncClient
from outrider.client.events import Tokens
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol.sampling_params import SamplingParams
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import Output, Redis, ask, client, follow, generate, in_process
from tests.contract.conftest import Home, slowed, verifier_serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEATS = 8
TOKENS = 400
WRITE_S = 1.5
SEND_BUFFER = 16 * 1024
LONG: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 20}
SMALL_WINDOW = [*channel_options(), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


@asynccontextmanager
async def serving(loaded: LoadedModel, redis_url: str, folder: Path, send_buffer: int = 0) -> AsyncIterator[Home]:
    """Few seats, and little patience with clients. 0: the kernel chooses how much it takes for them."""
    settings = CoordinatorSettings(
        http_port=0, heartbeat_ms=100, max_sessions=SEATS, max_request_sessions=SEATS, write_timeout_s=WRITE_S
    )
    service = CoordinatorService(settings, redis_url)
    async with (
        in_process(service, settings) as coordinator,
        verifier_serving(loaded, folder, coordinators=coordinator),
    ):
        if send_buffer:
            service._http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        home = Home(coordinator, service, loaded)
        await home.knows(0)
        yield home


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(
    loaded: LoadedModel, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Home]:
    async with serving(loaded, redis_server.url, tmp_path_factory.mktemp("tokenizer")) as small:
        yield small


def going(home: Home) -> int:
    return sum(not session.ended for session in home.service.sessions.live)


@contextmanager
def asked(home: Home, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request for a stream on a connection with a small window, from which nothing is read here."""
    host, port = home.service.http_address.rsplit(":", 1)
    data = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        connection.setblocking(False)
        yield connection


async def read(connection: socket.socket) -> bytes:
    """All that comes until the end, or until the connection is cut off."""
    loop = asyncio.get_running_loop()
    parts = []
    while part := await loop.sock_recv(connection, 65536):
        parts.append(part)
    return b"".join(parts)


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        continue


async def test_an_http_client_that_never_reads_keeps_no_seat(
    loaded: LoadedModel, redis_server: Redis, tmp_path: Path
) -> None:
    """A kernel takes up to 4 MB that nobody reads: the whole answer, if it is written in a few large parts."""
    body = {"prompt": "Nobody reads this. ", "n": SEATS, **LONG}
    async with serving(loaded, redis_server.url, tmp_path, SEND_BUFFER) as small:
        with asked(small, body) as connection:
            assert await soon(lambda: going(small) == SEATS, 10)
            assert await soon(lambda: going(small) == 0, 30), "a seat ends with its generation"
            async with client(small.coordinator) as stub:
                output = await generate(stub, ask("Others are served.", max_tokens=4, ignore_eos=True))
            assert len(output.token_ids) == 4
            assert await soon(lambda: len(small.service.sessions.live) == 0, WRITE_S + 5), "and it is not waited for"
            with pytest.raises(ConnectionError):
                await read(connection)


async def test_a_grpc_client_that_never_reads_keeps_no_seat(small: Home) -> None:
    with capture_logs() as lines:
        await never_reading(small)
    told = [line["status"] for line in lines if line["event"] == "grpc" and line["method"] == "Generate"]
    assert sorted(told) == [*["DEADLINE_EXCEEDED"] * SEATS, "OK"], "as the clients were told"


async def never_reading(small: Home) -> None:
    async with grpc.aio.insecure_channel(small.coordinator, options=SMALL_WINDOW) as channel:
        stub: Any = rpc.OutriderStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        calls = [stub.Generate(ask("Nobody reads this. ", **LONG), timeout=60) for _ in range(SEATS)]
        for call in calls:
            assert (await call.read()).HasField("started")
        assert await soon(lambda: going(small) == 0, 30)
        async with client(small.coordinator) as other:
            assert len((await generate(other, ask("Others are served.", max_tokens=4, ignore_eos=True))).token_ids) == 4
        assert await soon(lambda: len(small.service.sessions.live) == 0, WRITE_S + 5)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await to_the_end(call)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "has not read" in (caught.value.details() or "")


async def test_who_pauses_gets_the_whole_text(small: Home) -> None:
    body = {"prompt": "Somebody reads this later. ", "temperature": 0, **LONG}
    with asked(small, body) as connection:
        assert await soon(lambda: going(small) == 1, 10)
        assert await soon(lambda: going(small) == 0, 30)
        await asyncio.sleep(WRITE_S / 3)
        events = (await read(connection)).split(b"\r\n\r\n", 1)[1]
    async with httpx.AsyncClient(base_url=f"http://{small.service.http_address}", timeout=30) as web:
        whole = (await web.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    lines = [part for part in events.replace(b"\r\n", b"\n").split(b"\n") if part.startswith(b"data: {")]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == whole
    assert b"data: [DONE]" in events
    async with client(small.coordinator) as stub:
        call = stub.Generate(ask("Somebody reads this later. ", temperature=0.0, **LONG), timeout=60)
        replies = aiter(call)
        await anext(replies)
        assert await soon(lambda: going(small) == 0, 30)
        started = time.monotonic()
        await asyncio.sleep(WRITE_S / 3)
        output = await follow(call, Output())
        assert time.monotonic() - started < WRITE_S + 5
    assert (len(output.token_ids), output.text) == (TOKENS, whole)
    assert len(output.logprobs) == TOKENS


async def test_the_client_goes_on_after_its_stream_was_ended_unread(small: Home) -> None:
    async with AsyncClient(small.coordinator) as reader:
        reader._channels = [grpc.aio.insecure_channel(small.coordinator, options=SMALL_WINDOW)]
        replies = reader.generate("Somebody reads on much later. ", params=SamplingParams(temperature=0, **LONG))
        await anext(replies)
        assert await soon(lambda: len(small.service.sessions.live) == 0, 30 + WRITE_S)
        await asyncio.sleep(2)  # past the end of the call
        output = [reply async for reply in replies]
    assert sum(len(reply.token_ids) for reply in output if isinstance(reply, Tokens)) == TOKENS


async def test_one_request_asks_for_so_many_answers_at_most(small: Home) -> None:
    async with httpx.AsyncClient(base_url=f"http://{small.service.http_address}", timeout=30) as web:
        reply = await web.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 3})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "n"
    assert "9 answers" in reply.json()["error"]["message"]


async def test_the_message_of_a_request_is_not_kept_while_its_answer_is_written(small: Home) -> None:
    """Fields that are not known, of thirty megabytes, count for no limit of prompts."""
    prompt = "Nothing of this is kept."
    data = ask(prompt, **LONG).SerializeToString()
    async with grpc.aio.insecure_channel(small.coordinator) as channel:
        with slowed(small.loaded, 0.01):
            opened: Any = channel.unary_stream("/outrider.v1.Outrider/Generate")
            call = opened(data)
            for _ in range(3):
                assert await call.read()
            assert going(small) == 1
            kept = (one for one in gc.get_objects() if isinstance(one, pb.GenerateRequest))
            assert not [one for one in kept if one.prompt == prompt], "those of earlier tests are of no interest"
            call.cancel()
    assert await soon(lambda: not going(small), 5)
