"""The load test: its prompts, figures and exit codes, and the link over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import typer

from loadtest.__main__ import main, table
from loadtest.prompts import KINDS, PROMPTS
from loadtest.summary import NO_REQUESTS, TEXT_DIFFERS, Summary, summarise
from loadtest.workload import Output, cases, difference
from outrider import link as link_module
from outrider.endpoint import allowed, is_loopback, split
from outrider.errors import InvalidRequest, Overloaded
from outrider.guard import Guard
from outrider.keys import Keys
from outrider.link import Link, Shape
from outrider.messages import FinishReason, Verification
from outrider.serving import ErrorInterceptor
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc

SOON_S = 5.0  # what should happen at once has this long on a busy machine
QUIET_S = 0.1  # how long nothing must happen
SMALLEST_CONTEXT = 2048  # bytes, of the tiny models, which take a byte for a token


# Prompts and cases.


def test_every_kind_has_prompts_of_its_own() -> None:
    assert set(KINDS) == {"chat", "summarise", "edit", "code", "translate"}
    for kind in KINDS:
        assert 4 <= sum(prompt.kind == kind for prompt in PROMPTS) <= 6
    assert len({prompt.name for prompt in PROMPTS}) == len(PROMPTS)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)
def test_a_prompt_is_a_text_or_a_chat_that_fits(prompt: Any) -> None:
    assert bool(prompt.text) != bool(prompt.chat)
    said = prompt.text or "".join(f"<{role}>{content}\n" for role, content in prompt.chat)
    assert len(said.encode()) < SMALLEST_CONTEXT - 512
    if prompt.chat:
        assert [role for role, _ in prompt.chat] == ["user", "assistant"] * (len(prompt.chat) // 2) + ["user"]


def test_every_case_has_one_right_answer() -> None:
    made = cases("", 32)
    assert len({case.name for case in made}) == len(made) == len(PROMPTS)
    for case in made:
        case.params.check()
        assert case.params.max_tokens == 32
        assert case.params.mode is Verification.GREEDY or case.params.seed is not None
    for kind in KINDS:
        assert {case.params.mode for case in cases(kind, 32)} == {Verification.GREEDY, Verification.COUPLED}


def test_cases_of_chosen_kinds_are_the_same_cases() -> None:
    assert cases("code,chat", 8) == [case for case in cases("", 8) if case.prompt.kind in ("code", "chat")]
    with pytest.raises(InvalidRequest, match=r"kinds is poems, must be of chat, "):
        cases("chat,poems", 8)


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (Output("one two", (1, 2)), ""),
        (Output("one too", (1, 3)), "from character 5 on 'oo' instead of 'wo'"),
        (Output("one", (1,)), "from character 3 on '' instead of ' two'"),
        (Output("one two", (1, 2, 2)), "the same text from other tokens, from token 2 on"),
    ],
)
def test_difference_says_where(got: Output, says: str) -> None:
    assert difference(Output("one two", (1, 2)), got) == says


# Where load may go.


@pytest.mark.parametrize("endpoint", ["127.0.0.1:50050", "localhost:1", "[::1]:50050", "127.0.0.1:1, 127.9.9.9:2"])
def test_loopback_is_allowed(endpoint: str) -> None:
    assert allowed(endpoint, allow_remote=False) == [part.strip() for part in endpoint.split(",")]


@pytest.mark.parametrize(
    "endpoint", ["10.0.0.1:50050", "example.org:50050", "0.0.0.0:50050", "127.0.0.1:1,example.org:2", "127.0.0.1.nip:1"]
)
def test_other_machines_are_refused_unless_permitted(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="--allow-remote"):
        allowed(endpoint, allow_remote=False)
    assert allowed(endpoint, allow_remote=True)


@pytest.mark.parametrize(
    "endpoint",
    ["", ",", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:70000", ":1", "::1:5", "dns:///127.0.0.1:1", "a:b", "a:²"],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port"):
        allowed(endpoint, allow_remote=True)


def test_an_endpoint_is_split() -> None:
    assert split("[::1]:5") == ("::1", 5)
    assert not is_loopback("")


def test_commands_refuse_other_machines(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="--allow-remote"):
        main(endpoint="10.0.0.1:50050", report=tmp_path)
    with pytest.raises(typer.BadParameter, match="--allow-remote"):
        link_module.main(to="10.0.0.1:50051")
    with pytest.raises(typer.BadParameter, match="--allow-remote"):
        link_module.main(to="127.0.0.1:50051", listen="0.0.0.0:0")
    assert not list(tmp_path.iterdir())


# Figures.


def _times(requests: int, failures: int = 0, tokens: int = 0, ms: float = 0.0) -> Any:
    return SimpleNamespace(
        num_requests=requests,
        num_failures=failures,
        total_content_length=tokens,
        get_response_time_percentile=lambda share: ms * share,
    )


def test_figures_come_from_both_events() -> None:
    summary = summarise(_times(11, ms=100), _times(10, tokens=480, ms=1000), [], 4.0)
    assert (summary.requests, summary.tokens, summary.tokens_per_second) == (10, 480, 120.0)
    assert (summary.first_token_p50_ms, summary.first_token_p95_ms) == (50, 95)
    assert (summary.total_p50_ms, summary.total_p95_ms) == (500, 950)
    assert summary.verdict == ""


def test_failures_are_named_and_fail_the_run() -> None:
    troubles = [SimpleNamespace(error=TEXT_DIFFERS, occurrences=2), SimpleNamespace(error="overloaded", occurrences=3)]
    summary = summarise(_times(10), _times(10, failures=5), troubles, 4.0)
    assert summary.different_texts == 2
    assert summary.verdict == "3 × overloaded, 2 × text differs"


def test_a_run_in_which_nothing_completed_fails() -> None:
    summary = summarise(_times(0), _times(0), [], 0.0)
    assert summary.verdict == NO_REQUESTS
    assert summary.tokens_per_second == 0.0


def test_figures_survive_their_file(tmp_path: Path) -> None:
    summary = Summary(1.5, 3, 1, 96, 1.0, 2.0, 3.0, 4.0, {"expired": 1})
    summary.save(tmp_path / "summary.json")
    assert Summary.load(tmp_path / "summary.json") == summary
    assert table(summary).row_count == 7


# Whole runs, against a coordinator that is made up.


class MadeUp(rpc.OutriderServicer):
    """Streams each prompt back, a word at a time; under load it does to some what `spoil` says."""

    def __init__(self, spoil: Callable[[str], str] = lambda asked: asked) -> None:
        self._spoil = spoil

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        asked = request.prompt or request.chat.messages[-1].content
        plain = request.speculation.HasField("gamma") and request.speculation.gamma == 0
        words = (asked if plain else self._spoil(asked)).split()
        yield pb.GenerateReply(started=pb.Started(session_id="s", seed=request.params.seed, model="made up"))
        for position, word in enumerate(words):
            chunk = pb.Chunk(position=position, text=f"{word} ", token_ids=[len(word)], kinds=[4])
            yield pb.GenerateReply(chunk=chunk)
            await asyncio.sleep(0.001)
        yield pb.GenerateReply(
            complete=pb.Complete(finish_reason=FinishReason.STOP.value, output_tokens=len(words))  # type: ignore[arg-type]
        )


@contextlib.asynccontextmanager
async def made_up(service: MadeUp, keys: Keys = Keys()) -> AsyncIterator[str]:  # noqa: B008 -- a value
    server = grpc.aio.server(interceptors=[Guard({"outrider.v1.Outrider": keys}), ErrorInterceptor()])
    rpc.add_OutriderServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def run(endpoint: str, report: Path) -> int:
    """The exit code of a second under load."""
    try:
        await asyncio.to_thread(main, users=4, spawn_rate=4, seconds=1, endpoint=endpoint, kinds="chat", report=report)
    except typer.Exit as left:
        return left.exit_code
    return 0


async def test_a_run_of_right_texts_passes(tmp_path: Path) -> None:
    async with made_up(MadeUp()) as endpoint:
        assert await run(endpoint, tmp_path) == 0
    summary = Summary.load(tmp_path / "summary.json")
    assert summary.requests > 0
    assert summary.failures == 0
    lengths = [len(prompt.chat[-1][1].split()) for prompt in PROMPTS if prompt.kind == "chat"]
    assert min(lengths) * summary.requests <= summary.tokens <= max(lengths) * summary.requests
    assert 0 < summary.first_token_p50_ms <= summary.total_p50_ms
    assert {"report.html", "locust_stats.csv", "locust.log"} <= set(os.listdir(tmp_path))


async def test_a_run_shows_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "s3cret")
    async with made_up(MadeUp(), Keys(["s3cret"])) as endpoint:
        assert await run(endpoint, tmp_path / "right") == 0
        monkeypatch.setenv("OUTRIDER_API_KEY", "wrong")
        assert await run(endpoint, tmp_path / "wrong") == 1
    assert "cannot start: unauthenticated: " in (tmp_path / "wrong" / "locust.log").read_text()


async def test_a_run_with_wrong_texts_or_errors_fails(tmp_path: Path) -> None:
    spoilt = []

    def spoil(asked: str) -> str:
        if "tides" in asked and spoilt:  # an error makes a user pause: not before there was a wrong text
            raise Overloaded("full")
        if "bakery" in asked:
            spoilt.append(asked)
        return asked.replace("bakery", "brewery")

    async with made_up(MadeUp(spoil)) as endpoint:
        assert await run(endpoint, tmp_path) == 1
    summary = Summary.load(tmp_path / "summary.json")
    assert set(summary.errors) == {TEXT_DIFFERS, "overloaded"}
    assert summary.failures == sum(summary.errors.values()) < summary.requests
    log = (tmp_path / "locust.log").read_text()
    assert "chat/names coupled: text differs: from character 32 on 'rewery" in log
    assert "chat/tides greedy: overloaded: " in log


async def test_a_run_against_nobody_fails(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        assert await run(f"127.0.0.1:{taken.getsockname()[1]}", tmp_path) == 1
    assert not (tmp_path / "summary.json").exists()
    assert "cannot start: " in (tmp_path / "locust.log").read_text()


# The link.

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Target:
    """Echoes what comes, and remembers how its connections ended."""

    def __init__(self) -> None:
        self.port = 0
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    async def __aenter__(self) -> Target:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            self.ends.put_nowait("closed")
        except ConnectionError:
            self.ends.put_nowait("reset")
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def linked(shape: Shape | None = None) -> AsyncIterator[tuple[Target, Link]]:
    async with Target() as target, Link("127.0.0.1", target.port, shape) as link:
        yield target, link


@contextlib.asynccontextmanager
async def connected(link: Link) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(link.host, link.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def echo(streams: Streams, data: bytes = b"hello", *, within_s: float = SOON_S) -> float:
    """Seconds for data to go there and come back."""
    reader, writer = streams
    begun = time.perf_counter()
    writer.write(data)
    assert await asyncio.wait_for(reader.readexactly(len(data)), within_s) == data
    return time.perf_counter() - begun


async def echo_once(link: Link) -> None:
    async with connected(link) as streams:
        await echo(streams)


async def is_silent(streams: Streams) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(streams[0].read(1), QUIET_S)
        return False
    return True


async def test_a_link_without_a_shape_only_counts() -> None:
    async with linked() as (_, link), connected(link) as one, connected(link) as two:
        await echo(one, b"x" * 100_000)
        await echo(two, b"y" * 50)
        assert (link.up.num_bytes, link.down.num_bytes) == (100_050, 100_050)
        assert (link.accepted, link.connections) == (2, 2)


async def test_delay_is_one_way_and_can_change() -> None:
    async with linked(Shape(delay_ms=30)) as (_, link), connected(link) as streams:
        fastest = min([await echo(streams) for _ in range(5)])
        assert 0.060 <= fastest < 0.120
        link.shape = Shape()
        assert min([await echo(streams) for _ in range(5)]) < 0.030


async def test_delay_does_not_limit_throughput() -> None:
    data = b"z" * (64 * link_module.CHUNK)
    async with linked(Shape(delay_ms=50)) as (_, link), connected(link) as streams:
        reader, writer = streams
        reading = asyncio.create_task(reader.readexactly(len(data)))
        begun = time.perf_counter()
        writer.write(data)
        assert await asyncio.wait_for(reading, SOON_S) == data
        assert time.perf_counter() - begun < 64 * 0.050 / 2  # one chunk per delay would take twice that, each way


async def test_jitter_keeps_the_order() -> None:
    async with linked(Shape(jitter_ms=8)) as (_, link), connected(link) as (reader, writer):
        sent = b""
        for number in range(100):
            writer.write(piece := f"{number},".encode())
            await asyncio.sleep(0)
            sent += piece
        assert await asyncio.wait_for(reader.readexactly(len(sent)), SOON_S) == sent


async def test_jitter_spreads_the_delay() -> None:
    async with linked(Shape(delay_ms=5, jitter_ms=40)) as (_, link), connected(link) as streams:
        taken = [await echo(streams) for _ in range(12)]
        assert min(taken) >= 0.010
        assert max(taken) - min(taken) > 0.015


async def test_bandwidth_is_shared_by_the_connections() -> None:
    async with (
        linked(Shape(bytes_per_s=500_000)) as (_, link),
        connected(link) as one,
        connected(link) as two,
    ):
        begun = time.perf_counter()
        await asyncio.gather(echo(one, b"a" * 50_000), echo(two, b"b" * 50_000))
        assert 0.190 <= time.perf_counter() - begun < 2.0


async def test_a_window_holds_the_sender_back() -> None:
    shape = Shape(delay_ms=200, window_bytes=2 * link_module.CHUNK)
    data = b"w" * (6 * link_module.CHUNK)
    async with linked(shape) as (_, link), connected(link) as streams:
        assert await echo(streams, data) > 0.400 + 0.200


async def test_a_cut_resets_both_ends_and_new_connections_work() -> None:
    async with linked(Shape(delay_ms=1)) as (target, link), connected(link) as streams:
        await echo(streams)
        link.cut()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(streams[0].read(1), SOON_S)
        assert await asyncio.wait_for(target.ends.get(), SOON_S) == "reset"
        await echo_once(link)


async def test_a_refusing_cut_lasts_until_healed() -> None:
    async with linked() as (_, link):
        link.cut(refuse=True)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await echo_once(link)
        link.heal()
        await echo_once(link)


async def test_a_stall_is_silent_and_nothing_is_lost() -> None:
    async with linked() as (_, link), connected(link) as streams:
        await echo(streams)
        link.stall()
        streams[1].write(b"held")
        async with connected(link) as late:
            late[1].write(b"late")
            assert await is_silent(streams)
            assert await is_silent(late)
            link.heal()
            assert await asyncio.wait_for(streams[0].readexactly(4), SOON_S) == b"held"
            assert await asyncio.wait_for(late[0].readexactly(4), SOON_S) == b"late"


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_stall_hides_that_an_end_has_gone(how: str) -> None:
    async with linked() as (target, link):
        async with connected(link) as streams:
            await echo(streams)
            link.stall()
            if how == "reset":
                streams[1].get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, link_module._LINGER_0
                )
                streams[1].transport.abort()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(target.ends.get(), QUIET_S)
        link.heal()
        assert await asyncio.wait_for(target.ends.get(), SOON_S) == how


async def test_a_stalled_link_can_be_cut() -> None:
    async with linked() as (target, link), connected(link) as streams:
        await echo(streams)
        link.stall()
        link.cut()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(streams[0].read(1), SOON_S)
        assert await asyncio.wait_for(target.ends.get(), SOON_S) == "reset"


async def test_one_end_may_stop_sending_and_still_receive() -> None:
    async with linked(Shape(delay_ms=10)) as (target, link), connected(link) as (reader, writer):
        writer.write(b"last words")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), SOON_S) == b"last words"
        assert await asyncio.wait_for(target.ends.get(), SOON_S) == "closed"


async def test_a_target_that_is_not_there_resets_the_client() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with Link("127.0.0.1", taken.getsockname()[1]) as link, connected(link) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(1), SOON_S)


async def test_leaving_a_link_ends_what_is_under_way() -> None:
    before = asyncio.all_tasks()
    async with Target() as target:
        async with Link("127.0.0.1", target.port, Shape(delay_ms=60_000)) as link:
            reader, writer = await asyncio.open_connection(link.host, link.port)
            writer.write(b"never")
            await asyncio.sleep(0.02)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), SOON_S)
        assert await asyncio.wait_for(target.ends.get(), SOON_S) == "reset"
        writer.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize(
    "given", [{"delay_ms": -1}, {"jitter_ms": float("nan")}, {"bytes_per_s": float("inf")}, {"window_bytes": 1}]
)
def test_a_shape_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(given))} is .*, must be at least"):
        Shape(**given)


async def test_the_link_by_hand() -> None:
    async with Target() as target:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider.link", "--to", f"127.0.0.1:{target.port}", "--delay-ms", "5"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            said = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
            host, port = split(said.removeprefix("listening at ").strip())
            reader, writer = await asyncio.open_connection(host, port)
            assert await echo((reader, writer)) >= 0.010
            writer.close()
            process.send_signal(signal.SIGTERM)
            rest = await asyncio.wait_for(process.stdout.read(), SOON_S)
            assert rest.decode().strip() == "1 connections, 5 bytes up, 5 bytes down"
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
