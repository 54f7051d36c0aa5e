"""What a stranger may throw at the HTTP edge: it answers in order, or hangs up; it never falls and never waits."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest
import pytest_asyncio
import structlog
from starlette.responses import JSONResponse

from coordinator.api.http.limits import RequestIds
from tests.contract.conftest import House, soon

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATH = "/v1/completions"
PATIENCE_S = 1.0  # of the house
BODY = {"prompt": "One and one is", "max_tokens": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def web(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{house.service.http_address}", timeout=30) as made:
        yield made


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def nothing_is_left(web: httpx.AsyncClient, house: House) -> AsyncIterator[None]:
    yield
    assert (await web.get("/health")).status_code == 200
    assert await soon(lambda: len(house.service.sessions.live) == 0, 5)


async def post(web: httpx.AsyncClient, content: bytes | str, path: str = PATH) -> httpx.Response:
    return await web.post(path, content=content, headers={"Content-Type": "application/json"})


class Wire:
    """A connection on which anything can be said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def all(self, seconds: float = 10) -> bytes:
        """What comes until the server hangs up."""
        heard = b""
        async with asyncio.timeout(seconds):
            try:
                while data := await self._reader.read(65536):
                    heard += data
            except ConnectionError:
                pass  # it hung up while we were talking
        return heard

    async def some(self) -> bytes:
        async with asyncio.timeout(10):
            return await self._reader.read(65536)


@asynccontextmanager
async def wire(house: House) -> AsyncIterator[Wire]:
    host, port = house.service.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def statuses(heard: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", heard)]


def request(*headers: str, method: str = "POST", path: str = PATH, body: bytes = b"") -> bytes:
    head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers])
    return f"{head}\r\n\r\n".encode("latin-1") + body


JSON = json.dumps(BODY).encode()
LENGTH = f"Content-Length: {len(JSON)}"
CLOSE = "Connection: close"


# --- what is said slowly, or never -----------------------------------------------------------------------------------


async def test_a_head_that_drips_is_not_waited_for(house: House) -> None:
    async with wire(house) as one:

        async def drip() -> None:
            for byte in request(LENGTH):
                await one.say(bytes([byte]))
                await asyncio.sleep(PATIENCE_S / 5)

        dripping = asyncio.create_task(drip())
        began = time.monotonic()
        assert await one.all() == b""
        assert time.monotonic() - began < 3 * PATIENCE_S
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


async def test_a_connection_that_says_nothing_is_not_kept(house: House) -> None:
    async with wire(house) as one:
        assert await one.all(5 * PATIENCE_S) == b""


async def test_a_head_that_drips_after_an_answer_is_not_waited_for_either(house: House) -> None:
    async with wire(house) as one:
        await one.say(request(method="GET", path="/health"))
        assert statuses(await one.some()) == [200]
        await one.say(b"GET /hea")
        assert await one.all(5 * PATIENCE_S) == b""


async def test_a_body_that_drips_is_not_waited_for(house: House) -> None:
    async with wire(house) as one:
        await one.say(request("Content-Length: 1000") + JSON[:10])
        assert statuses(await one.all(10 * PATIENCE_S)) == [408]


async def test_an_idle_connection_is_kept_between_requests(house: House) -> None:
    async with wire(house) as one:
        for _ in range(2):
            await one.say(request(method="GET", path="/health"))
            assert statuses(await one.some()) == [200]
            await asyncio.sleep(1.5 * PATIENCE_S)  # longer than it may take to say a request, as time itself is meant


async def test_a_client_that_does_not_read_holds_up_nobody(web: httpx.AsyncClient, house: House) -> None:
    async with wire(house) as one:
        body = json.dumps(BODY | {"max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
        await one.say(request(f"Content-Length: {len(body)}", body=body))
        assert (await post(web, JSON)).status_code == 200
    assert await soon(lambda: len(house.service.sessions.live) == 0, 3)


# --- lies about length -----------------------------------------------------------------------------------------------


async def test_requests_in_one_breath_are_answered_in_order(house: House) -> None:
    async with wire(house) as one:
        get = request(method="GET", path="/health")
        none = request(method="GET", path="/nowhere")
        await one.say(get + request(LENGTH, body=JSON) + none + get + request(CLOSE, method="GET", path="/ready"))
        assert statuses(await one.all()) == [200, 200, 404, 200, 200]


@pytest.mark.parametrize(
    ("headers", "body", "answers"),
    [
        ([f"Content-Length: {len(JSON) - 1}", CLOSE], JSON, [400]),
        ([f"Content-Length: {len(JSON) - 1}"], JSON + b" \r\n\r\n", [400, 400]),  # no JSON, and no request
        (["Content-Length: -1"], JSON, [400]),
        (["Content-Length: 0x10"], JSON, [400]),
        ([LENGTH, f"Content-Length: {len(JSON) + 1}"], JSON, [400]),
        (["Content-Length: 9999999999999999999999999"], JSON, [400]),
        (["Transfer-Encoding: chunked", CLOSE], b"%x\r\n%s\r\n0\r\n\r\n" % (len(JSON), JSON), [200]),
        (
            ["Transfer-Encoding: chunked", CLOSE],
            b"".join(b"1\r\n%c\r\n" % byte for byte in JSON) + b"0\r\n\r\n",
            [200],
        ),
        (["Transfer-Encoding: chunked"], b"zz\r\n" + JSON, [400]),
        (["Transfer-Encoding: gzip"], JSON, [400]),
        (["Expect: 100-continue", LENGTH, CLOSE], JSON, [100, 200]),
    ],
    ids=[
        "short",
        "short and on",
        "negative",
        "hex",
        "two",
        "huge",
        "chunked",
        "bytewise",
        "no chunk",
        "other coding",
        "continue",
    ],
)
async def test_bodies_of_any_length(house: House, headers: list[str], body: bytes, answers: list[int]) -> None:
    async with wire(house) as one:
        await one.say(request(*headers, body=body))
        assert statuses(await one.all()) == answers


@pytest.mark.parametrize("expects", [[], ["Expect: 100-continue"]])
async def test_a_body_that_says_that_it_is_too_large_is_not_waited_for(house: House, expects: list[str]) -> None:
    """Its client was told after ten seconds that it was slow, and sent it again."""
    async with wire(house) as one:
        await one.say(request("Content-Length: 1000000000000", *expects))
        assert statuses(await one.some()) == [413]


async def test_a_body_without_end_is_cut_off(house: House) -> None:
    async with wire(house) as one:
        await one.say(request("Transfer-Encoding: chunked"))

        async def pour() -> None:
            while True:
                await one.say(b"10000\r\n" + b" " * 0x10000 + b"\r\n")

        pouring = asyncio.create_task(pour())
        assert statuses(await one.some()) == [413]
        await one.all(5 * PATIENCE_S)
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)


@pytest.mark.parametrize(
    ("line", "headers", "chunked"),
    [
        (f"POST {PATH} HTTP/1.1", ["Last-Event-ID: 3", CLOSE], True),  # events have no ids: it is an answer of its own
        (f"POST {PATH} HTTP/1.1", ["Expect: 100-continue", CLOSE], True),
        (f"POST {PATH} HTTP/1.0", ["Connection: keep-alive"], False),  # only its end tells the length
    ],
    ids=["last event", "continue", "HTTP/1.0"],
)
async def test_streams_of_any_client(house: House, line: str, headers: list[str], chunked: bool) -> None:
    body = json.dumps(BODY | {"stream": True}).encode()
    said = request(*headers, f"Content-Length: {len(body)}", body=body)
    async with wire(house) as one:
        await one.say(said.replace(f"POST {PATH} HTTP/1.1".encode(), line.encode(), 1))
        heard = await one.all()  # to the end of the connection
    head, _, events = heard.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert (b"chunked" in head, b"Connection: close" in head) == (chunked, True)
    assert b"data: {" in events
    assert b"id: " not in events
    assert events.endswith(b"data: [DONE]\n\n" + b"\r\n0\r\n\r\n" * chunked)


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"X-%d: y\r\n" % i for i in range(20_000)),
        b"X: " + b"y" * 10_000_000 + b"\r\n",
        b"X\x00: y\r\n",
        b": y\r\n",
    ],
    ids=["many", "long", "NUL", "no name"],
)
async def test_headers_that_cannot_be(house: House, head: bytes) -> None:
    async with wire(house) as one:
        talking = asyncio.create_task(one.say(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n"))
        heard = await one.all()
        await asyncio.gather(talking, return_exceptions=True)  # it may have hung up on us
        assert statuses(heard) in ([400], []), "hung up, with a word or without"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: [", 403),
        (b"GET /nowhere HTTP/1.1\r\nHost: [", 403),
        (b"GET /nowhere HTTP/1.1\r\nHost: evil.example/a b", 403),
        (b"GET //health HTTP/1.1\r\nHost: localhost", 404),
        (b"GET /health/ HTTP/1.1\r\nHost: evil.example", 403),
        (b"GET /%ff%00%0d%0a HTTP/1.1\r\nHost: localhost", 404),
        (b"GET /v1/models/ HTTP/1.1\r\nHost: localhost", 404),
        (b"GET /v1/models/%ed%a0%80 HTTP/1.1\r\nHost: localhost", 404),
        (b"GET /playground.css/../../../app.py HTTP/1.1\r\nHost: localhost", 404),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost", 404),
        (b"BREW /health HTTP/1.1\r\nHost: localhost", 405),
        (b"GET /health", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS
    ],
)
async def test_strange_requests(house: House, line: bytes, status: int) -> None:
    async with wire(house) as one:
        await one.say(line + b"\r\nConnection: close\r\n\r\n")
        assert statuses(await one.all()) == [status]


async def test_other_methods(web: httpx.AsyncClient) -> None:
    for path in ("/health", "/v1/models", "/", "/openapi.json"):
        head = await web.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len((await web.get(path)).content)
    for method in ("HEAD", "OPTIONS", "PUT", "DELETE"):
        reply = await web.request(method, PATH)
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


# --- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (r'{"prompt": "\ud800"}', "body"),
        (r'{"prompt": "x", "\udfff": 1}', "body"),
        (r'{"prompt": "x", "metadata": {"a": "\ud800x"}}', "body"),
        (b'{"prompt": "\xed\xa0\x80"}', "body"),
        ('{"prompt": "x"}\0', "body"),
        ('\ufeff{"prompt": "x"}', "body"),
        ('{"prompt": "x"} {"prompt": "y"}', "body"),
        ('{"prompt": "x", "temperature": Infinity}', "body"),
        ('{"prompt": "x", "temperature": 1e999}', "temperature"),
        ('{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}", "body"),
        ('{"prompt": "x", "max_tokens": ' + "9" * 400 + "}", "max_tokens"),
        ('{"prompt": "x", "temperature": ' + "9" * 400 + "}", "temperature"),
        ('{"prompt": "x", "seed": ' + "9" * 30 + "}", "seed"),
        ('{"prompt": [' + "9" * 30 + "]}", "prompt.0"),
        ('{"prompt": "x", "logit_bias": {"9999999999": 1}}', "logit_bias.9999999999"),
        ('{"prompt": "x", "logit_bias": {"-1": 1}}', "logit_bias.-1"),
        ('{"prompt": "x", "logit_bias": {"5": -100, "005": 100}}', "logit_bias.005"),
        ('{"prompt": "x", "n": true}', "n"),
        ('{"prompt": "x", "n": "2"}', "n"),
        ('{"prompt": "x", "n": 1.5}', "n"),
        ('{"prompt": "x", "stream": 1}', "stream"),
        ('{"prompt": "x", "skip_special_tokens": 1}', "skip_special_tokens"),
        ('{"prompt": "x", "skip_special_tokens": "True"}', "skip_special_tokens"),
        ('{"prompt": "x", "top_logprobs": false}', "top_logprobs"),
        ('{"prompt": "x", "stop": ' + json.dumps(["x"] * 10_000) + "}", "stop"),
        ('{"prompt": "x", "stop": ' + json.dumps("x" * 1000) + "}", "stop"),
        ('{"prompt": "x", "metadata": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}", "body"),
        ('{"prompt": ' + "[" * 150 + "]" * 150 + "}", "prompt.0.0"),
        ('{"prompt": "x", "stop[]": 1}', "stop[]"),
        ('{"prompt": "x", "integer": 1}', "integer"),
        ('{"prompt": ' + json.dumps(["x"] * 2000) + "}", "prompt"),
        ("null", "body"),
        ('"prompt"', "body"),
    ],
)
async def test_bodies_that_cannot_be(web: httpx.AsyncClient, body: bytes | str, param: str) -> None:
    reply = await post(web, body)
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert error["param"] == param
    assert len(error["message"]) < 500, "nobody's megabytes are sent back"


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": "a\\u0000b\\u001f\\u007f\\ufffe", "max_tokens": 2}',
        '{"prompt": "\\ud83d\\ude00 \U0001f600 \u202e", "max_tokens": 2}',
        '{"prompt": "x", "max_tokens": 9, "max_tokens": 2}',
        '{"prompt": "x", "max_tokens": 2.0, "n": 1.0, "temperature": 1}',
        '{"prompt": "x", "max_tokens": 2e0, "seed": -9223372036854775808}',
        '{"prompt": "x", "max_tokens": 2, "seed": 18446744073709551615}',
        '{"prompt": "x", "max_tokens": 2, "metadata": ' + '{"a":' * 150 + "1" + "}" * 150 + "}",
        '{"prompt": "x", "max_tokens": 2, "stop": [], "logit_bias": {}, "stop_token_ids": []}',
        '{"prompt": "x", "max_tokens": 2, "stop": "\\u0000", "user": "\\u0000"}',
        "\n\t " + '{"prompt": "x", "max_tokens": 2}' + " \r\n",
    ],
)
async def test_bodies_that_look_odd_and_are_not(web: httpx.AsyncClient, body: str) -> None:
    reply = await post(web, body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": ["a"] * 1_000_000}),
        (PATH, {"prompt": [[]] * 1_000_000}),
        (PATH, {"prompt": [[-1] * 1_000_000]}),
        (PATH, {"prompt": "x"} | {f"a{i}": 0 for i in range(700_000)}),
        (PATH, {"prompt": "x", "logit_bias": {f"a{i}": 0 for i in range(700_000)}}),
        (PATH, {"prompt": "x", "stop": [0] * 1_000_000}),
        (PATH, {"prompt": "x", "stop_token_ids": ["a"] * 1_000_000}),
        ("/v1/chat/completions", {"messages": [0] * 1_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [0] * 1_000_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user"} | {f"a{i}": 0 for i in range(700_000)}]}),
    ],
)
async def test_a_million_faults_are_as_quick_as_one(web: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """All of them collected took fifteen seconds and more than a gigabyte, in which no token moved."""
    text = json.dumps(body)
    began = time.monotonic()
    reply = await post(web, text, path)
    assert time.monotonic() - began < 5
    assert reply.status_code == 400
    assert len(reply.content) < 1000


async def test_keys_that_are_none(web: httpx.AsyncClient) -> None:
    for key in ("two words", "x" * 257, b"\xe4\xf6"):
        reply = await web.post(PATH, json=BODY, headers={"Idempotency-Key": key})
        assert reply.status_code == 400, key
        assert reply.json()["error"]["param"] == "Idempotency-Key"


async def test_a_fault_of_ours_is_told_and_survived(
    web: httpx.AsyncClient, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> bool:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(house.service.sessions.store.connection, "answers", broken)
    reply = await web.get("/fleet", headers={"x-request-id": "mine"})
    assert reply.status_code == 500
    assert reply.headers["x-request-id"] == "mine"
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text


async def test_a_request_begins_without_what_the_one_before_it_on_its_connection_left() -> None:
    """asyncio reads a connection in the context of the request that paused it."""
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(structlog.contextvars.get_contextvars())
        await JSONResponse({})(scope, receive, send)

    async def send(message: Any) -> None:
        """Drop the response."""

    structlog.contextvars.bind_contextvars(tenant="alice", session_id="hers")
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await RequestIds(app)(scope, send, send)
    assert set(seen[0]) == {"request_id"}
