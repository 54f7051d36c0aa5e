"""Volume at the edges of real processes: bombs, silent connections, bodies held back."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from outrider.base.grpc_options import channel_options
from outrider.security.channels import Channels
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import Cluster, Process, ask, server_info, until
from tests.conftest import Models
from tests.http2 import Http2, bomb, message

pytestmark = pytest.mark.timeout(120)

API_KEY = "key-of-a-client"
FLEET_KEY = "secret-of-the-fleet"
BOMB_MIB = 160
BUDGET_MB = 64


@pytest.fixture(scope="module")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator and a verifier without a model, behind keys."""
    cluster = Cluster(
        tmp_path_factory.mktemp("edges"), flags=["--fleet-key", FLEET_KEY], access=Channels(key=API_KEY), redis=False
    )
    cluster.add_coordinator("--api-keys", API_KEY)
    cluster.add_verifier(models.target, "--engine", "mock")
    cluster.start()
    yield cluster
    cluster.stop()


# --- compressed messages ---------------------------------------------------------------------------------------------

_METHODS = {
    "coordinator, unary": ("coordinators", "/outrider.v1.Outrider/Cancel", API_KEY),
    "coordinator, one message in": ("coordinators", "/outrider.v1.Outrider/Generate", API_KEY),
    "coordinator, stream": ("coordinators", "/outrider.v1.Registry/Register", FLEET_KEY),
    "verifier, unary": ("verifiers", "/outrider.v1.Verifier/Probe", FLEET_KEY),
    "verifier, stream": ("verifiers", "/outrider.v1.Verifier/Verify", FLEET_KEY),
    "health": ("verifiers", "/grpc.health.v1.Health/Check", ""),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("keyed", [False, True], ids=["stranger", "with a key"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "snappy", "identity"])
@pytest.mark.parametrize("method", _METHODS)
def test_a_compressed_message_is_never_inflated(fleet: Cluster, method: str, encoding: str, keyed: bool) -> None:
    group, path, key = _METHODS[method]
    process: Process = getattr(fleet, group)[0]
    before = process.peak_memory_mb(anew=True)
    authorized = [("authorization", f"Bearer {key}")] if keyed and key else []
    with Http2(process.address) as peer:
        peer.call(1, path, ("grpc-encoding", encoding), *authorized)
        peer.data(1, message(bomb(BOMB_MIB, encoding), compressed=True), end=True)
        peer.until_ended(1)
    assert process.peak_memory_mb() - before < BOMB_MIB / 8
    assert server_info(fleet.address, fleet.access).coordinator_id


async def test_an_answer_that_is_compressed_is_never_inflated() -> None:
    """A worker may be as hostile as a client."""
    server = grpc.aio.server(compression=grpc.Compression.Gzip)

    class Hostile(rpc.OutriderServicer):
        async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
            return pb.ServerInfo(version="0" * 10_000_000)

    rpc.add_OutriderServicer_to_server(Hostile(), server)  # type: ignore[no-untyped-call,unused-ignore]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        reply = await rpc.OutriderStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    await server.stop(None)
    assert reply is None, "gRPC hands the compressed bytes on as they are, and they are no message"


@pytest.mark.parametrize("method", [name for name in _METHODS if name != "health"])
def test_a_strangers_message_is_not_read(fleet: Cluster, method: str) -> None:
    """No more of it than fits into the connection's window."""
    group, path, _ = _METHODS[method]
    with Http2(getattr(fleet, group)[0].address) as peer:
        peer.call(1, path)
        assert not peer.data(1, message(verify.FileChunk(data=bytes(24 << 20)).SerializeToString()), end=True)
        peer.until_ended(1)
        assert b"valid key" in peer.said()


# --- connections -----------------------------------------------------------------------------------------------------

DESCRIPTORS = 256
IDLE = 300


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A coordinator that may open few files."""
    cluster = Cluster(tmp_path_factory.mktemp("poor"), redis=False)
    origins = "http://Page.example:3000/, https://other.example"
    names = ("--cors-origins", origins, "--allowed-hosts", "Proxy.example:8443")
    process = cluster.add_coordinator("--open-timeout-s", "20", *names)
    process.limit_descriptors(DESCRIPTORS)
    process.start().wait_ready()
    yield process
    process.stop()


def get(process: Process, path: str = "/health") -> int:
    return httpx.get(f"{process.web}{path}", timeout=10).status_code


def test_metadata_that_is_not_utf8_leaves_no_traceback(poor: Process) -> None:
    """gRPC logs its own decoding error with one."""
    before = len(poor.log())
    with Http2(poor.address) as peer:
        peer.call(1, "/outrider.v1.Outrider/GetServerInfo", ("x-request-id", "\udce4"))
        peer.data(1, message(b""), end=True)
        peer.until_ended(1)
    said = until(lambda: "Invalid encoding" in poor.log()[before:] and poor.log()[before:], 10, "gRPC's complaint")
    assert "Traceback" not in said


def test_idle_connections_keep_nobody_out(poor: Process) -> None:
    host, port = poor.web.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for number in range(IDLE):
            idle = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            if number % 2:
                idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(2 * IDLE):
            stack.enter_context(socket.create_connection(("127.0.0.1", poor.port), timeout=10))
        assert [get(poor) for _ in range(5)] == [200] * 5
        opened = len(list(Path(f"/proc/{poor.pid}/fd").iterdir()))
        assert opened < DESCRIPTORS - 20
    assert server_info(poor.address).coordinator_id
    assert len(poor.log()) < 100_000, "a line for each answer, and no more"


# --- bodies ----------------------------------------------------------------------------------------------------------

HELD_MB = 12
HOLDING = 40


def test_bodies_that_are_held_back_take_no_more_than_the_budget(fleet: Cluster) -> None:
    process = fleet.coordinators[0]
    host, port = process.web.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {API_KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {HELD_MB * 1_000_000 + 1}\r\n\r\n"
    before = process.memory_mb()
    with contextlib.ExitStack() as stack:
        for _ in range(HOLDING):
            silent = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            with contextlib.suppress(ConnectionError):
                silent.sendall(head.encode() + bytes(HELD_MB * 1_000_000))
        assert process.memory_mb() - before < 2 * BUDGET_MB
        headers = {"Authorization": f"Bearer {API_KEY}"}
        body = {"prompt": "a b c", "max_tokens": 4}
        answer = httpx.post(f"{process.web}/v1/completions", json=body, headers=headers, timeout=20)
        assert answer.status_code == 200, "small requests are not kept out"
        large = httpx.post(f"{process.web}/v1/completions", content=bytes(9_000_000), headers=headers, timeout=20)
        assert (large.status_code, large.json()["error"]["code"]) == (503, "overloaded")
        metrics = httpx.get(f"{process.web}/metrics", headers=headers, timeout=20).text
        assert re.search(r'outrider_requests_refused_by_limit_total\{limit="request"\} [1-9]', metrics)
    until(lambda: process.memory_mb() - before < BUDGET_MB / 2, 10, "memory given back")


HELD_CALLS = 32
FRAGMENTS_MB = 64  # that the allocator of gRPC's threads keeps, after one round as after many


def test_grpc_messages_that_are_held_back_take_no_more_than_the_budget(fleet: Cluster) -> None:
    process = fleet.coordinators[0]
    headers = {"Authorization": f"Bearer {API_KEY}"}
    request = message(ask("x" * HELD_MB * 1_000_000).SerializeToString())
    before = process.memory_mb()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Http2(process.address)) for _ in range(HELD_CALLS)]
        for peer in peers:
            peer.call(1, "/outrider.v1.Outrider/Generate", ("authorization", f"Bearer {API_KEY}"))
            peer.data(1, request[:-1])
        assert process.memory_mb() - before < 2 * BUDGET_MB + FRAGMENTS_MB

        def refused() -> bool:
            for peer in peers:
                peer.listen(0.01)
            return sum(b"are being read already" in peer.said() for peer in peers) >= HELD_CALLS - 2

        until(refused, 10, "all but two refused")
        with grpc.insecure_channel(process.address, options=channel_options()) as channel:
            small = ask("a b c", max_tokens=4)
            called = [("authorization", f"Bearer {API_KEY}")]
            replies = list(rpc.OutriderStub(channel).Generate(small, metadata=called, timeout=20))
            assert replies[-1].WhichOneof("message") == "complete", "small requests are not kept out"
    until(lambda: process.memory_mb() - before < FRAGMENTS_MB, 10, "memory given back")
    body = {"prompt": "a b c", "max_tokens": 4}
    assert httpx.post(f"{process.web}/v1/completions", json=body, headers=headers, timeout=20).status_code == 200


# --- what a body's length, a host and an origin may be ---------------------------------------------------------------


def say(process: Process, *lines: str, body: bytes = b"") -> bytes:
    """All that comes back until the server hangs up."""
    host, port = process.web.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        heard = b""
        while part := connection.recv(65_536):
            heard += part
        return heard


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 0"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5, 6",),
        ("Content-Length: +5",),
    ],
)
def test_a_body_of_two_lengths_is_refused_and_the_connection_closed(poor: Process, headers: tuple[str, ...]) -> None:
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    heard = say(poor, "POST /v1/completions HTTP/1.1", "Host: localhost", *headers, body=smuggled)
    assert re.findall(rb"HTTP/1\.1 (\d+)", heard) == [b"400"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.168.0.7", "[::2]"]
)
def test_a_page_that_rebinds_its_name_reads_nothing(poor: Process, host: str) -> None:
    heard = say(poor, "GET /v1/models HTTP/1.1", f"Host: {host}")
    assert heard.startswith(b"HTTP/1.1 403")
    assert b"--allowed-hosts" in heard


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000"])
def test_this_machines_own_names_are_served(poor: Process, host: str) -> None:
    assert say(poor, "GET /health HTTP/1.1", f"Host: {host}", "Connection: close").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:8000", 415), ("http://localhost:9", 403), ("https://evil.example", 403), ("null", 403)],
)
def test_pages_of_other_origins_change_nothing(poor: Process, origin: str, status: int) -> None:
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost:8000", f"Origin: {origin}", "Connection: close")
    assert say(poor, *lines, "Content-Length: 0").startswith(f"HTTP/1.1 {status}".encode())


def test_origins_and_hosts_may_be_given_as_an_address_bar_shows_them(poor: Process) -> None:
    """A URL's last slash, capital letters and the port of a host are none of what a browser compares."""
    lines = ("OPTIONS /v1/completions HTTP/1.1", "Host: localhost:8000", "Connection: close")
    for origin in ("http://page.example:3000", "https://other.example"):
        heard = say(poor, *lines, f"Origin: {origin}", "Access-Control-Request-Method: POST")
        assert f"access-control-allow-origin: {origin}\r\n".encode() in heard.lower()
    assert b" 400 " in say(poor, *lines, "Origin: http://page.example", "Access-Control-Request-Method: POST")[:20]
    for host in ("proxy.example", "proxy.example:8443", "proxy.example:9"):
        assert b" 200 " in say(poor, "GET /health HTTP/1.1", f"Host: {host}", "Connection: close")[:20]
