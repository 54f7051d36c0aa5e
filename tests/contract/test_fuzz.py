"""The fuzzer itself: the same number makes the same input, and what must not be is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import until
from tests.fuzz import calls, generators
from tests.fuzz.calls import connect, open_channel
from tests.fuzz.campaign import Problem
from tests.fuzz.case import CANCEL, CASES, Case, kept
from tests.fuzz.corpus import PROMPT, Known
from tests.fuzz.fleet import Neighbour
from tests.fuzz.generators import DRAFT, EDGES, PUBLIC, VERIFY, make
from tests.fuzz.neighbour import requests

MANY = 300
SHORT_S = 1.0  # until a server that says nothing more is given up


@pytest.fixture(scope="module")
def known() -> Known:
    target = common.ModelInfo(name="t", fingerprint="f", vocab_size=257, context_length=2048, eos_token_ids=[256])
    return Known(target, tuple(range(24)))


@pytest.mark.parametrize("edge", EDGES)
def test_a_number_makes_the_same_input_again(edge: str, known: Known) -> None:
    first = [make(edge, 7, number, known) for number in range(MANY)]
    assert first == [make(edge, 7, number, known) for number in range(MANY)]
    assert len({case.messages for case in first}) > MANY / 2, "most of them differ"
    assert first != [make(edge, 8, number, known) for number in range(MANY)]
    assert len({case.name for case in first}) > 3, "of several kinds"


@pytest.mark.parametrize("edge", EDGES)
def test_an_input_is_kept_as_it_was(edge: str, known: Known, tmp_path: Path) -> None:
    cases = [make(edge, 7, number, known) for number in range(30)]
    for case in cases:
        case.keep(tmp_path)
    again = kept(tmp_path, edge)
    assert {case.to_json() for case in again} == {case.to_json() for case in cases}
    assert all(case in cases for case in again)


def test_cases_that_were_kept_can_be_sent() -> None:
    for path in CASES.glob("*.json"):
        case = Case.from_json(path.read_text())
        assert case.edge in EDGES, path
        assert path.name.startswith(case.edge), path


def test_a_good_part_of_the_mutated_messages_gets_past_the_parser(known: Known) -> None:
    """Those that do not are refused in one place; it is what lies behind that is to be tried."""
    parsed = 0
    for number in range(MANY):
        case = make("verify", 7, number, known)
        parsed += case.method == VERIFY and _parses(verify.VerifyRequest, case.messages)
    assert parsed > MANY / 3


def _parses(kind: Any, messages: tuple[bytes, ...]) -> bool:
    try:
        return all(kind.FromString(message) is not None for message in messages)
    except Exception:
        return False


class Faulty(grpc.GenericRpcHandler):
    """A server with every fault that is looked for."""

    def __init__(self, manner: str) -> None:
        self.manner = manner

    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            if self.manner == "internal":
                await context.abort(grpc.StatusCode.INTERNAL, "oh")
            if self.manner == "echo":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "x" * 5_000)
            if self.manner == "unknown":
                await context.abort(grpc.StatusCode.UNKNOWN, "oh")
        if self.manner == "error":
            yield pb.GenerateReply(error=common.Error(code="internal", message="oh")).SerializeToString()
        if self.manner in ("mute", "endless"):
            if self.manner == "endless":
                yield b""
            await asyncio.sleep(60)
        yield b""


@asynccontextmanager
async def faulty(manner: str) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Faulty(manner),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with open_channel(address) as channel:
            yield channel
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("manner", "problem"),
    [
        ("well", ""),
        ("internal", "INTERNAL: oh"),
        ("unknown", "UNKNOWN: oh"),
        ("echo", "a message of 5000 characters"),
        ("error", "internal error in a stream"),
        ("mute", "no answer in"),
        ("endless", "no end in"),
    ],
)
@pytest.mark.parametrize("method", [PUBLIC + "Generate", DRAFT])
async def test_faults_of_a_grpc_server_are_noticed(
    method: str, manner: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if manner in ("mute", "endless"):
        monkeypatch.setattr(calls, "ANSWER_S", SHORT_S)
    request = generators.corpus.ask(PROMPT, max_tokens=2).SerializeToString()
    async with faulty(manner) as channel:
        end = CANCEL if method != DRAFT else "half-close"
        outcome = await calls.call(channel, method, (request,), end)
    if method != DRAFT and manner == "endless":
        problem = ""  # whether a long answer ends is not waited for
    assert problem in outcome.problem
    assert bool(problem) == bool(outcome.problem), outcome


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", ""),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno", ""),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno", "a fault of the server's"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"error":{"type":"server_error","code":"internal"}}', "a fault of the server's"),
        (b"", "no answer in"),
    ],
)
async def test_faults_of_an_http_server_are_noticed(
    answer: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not answer:
        monkeypatch.setattr(calls, "ANSWER_S", SHORT_S)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        if not answer:
            await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        outcome = await connect(Case("http", "x", "http", (b"GET / HTTP/1.1\r\n\r\n",)), f"127.0.0.1:{port}", http=True)
    assert problem in outcome.problem
    assert bool(problem) == bool(outcome.problem), outcome


def test_a_problem_says_how_to_have_it_again() -> None:
    told = Problem("http", "body: 500", 17, kept_as="tests/fuzz/cases/http-1.json").told(5)
    assert "python -m tests.fuzz --seed 5 --edge http --only 17" in told
    assert "tests/fuzz/cases/http-1.json" in told


class Forgetful(rpc.OutriderServicer):
    """Answers with nothing once the neighbour knows what to expect."""

    def __init__(self) -> None:
        self.asked = 0

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateReply]:
        self.asked += 1
        if self.asked <= 2 * len(requests()):
            yield pb.GenerateReply(chunk=pb.Chunk(token_ids=[1, 2]))


def test_a_neighbour_that_gets_nothing_or_ends_is_noticed(tmp_path: Path) -> None:
    """An empty answer ended it, and the campaign went on without it and passed."""
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_OutriderServicer_to_server(service := Forgetful(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        neighbour = Neighbour(f"127.0.0.1:{port}", tmp_path)
        until(lambda: len(neighbour.answers()) > 1 or neighbour._process.poll() is not None, 30, "two answers")
        assert [answer["equal"] for answer in neighbour.wrong()] == [False] * len(neighbour.answers())
        neighbour._process.kill()
        neighbour._process.wait(10)
        neighbour.stop()
    finally:
        server.stop(None)
    assert service.asked > 2 * len(requests())
    assert "the neighbour ended: status -9" in neighbour.wrong()[0]["error"]
