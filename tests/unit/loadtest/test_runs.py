"""The load test: its prompts, what it refuses, whole runs and their exit codes; and the link over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgpack
import pytest
import typer

from loadtest.__main__ import LOCUSTFILE, main
from loadtest.attempt import TEXT_DIFFERS
from loadtest.prompts import KINDS, PROMPTS
from loadtest.report.summary import Summary
from loadtest.settings import Load, LoadTarget
from loadtest.workload import Output, cases, difference, pick
from outrider.base.aio import until
from outrider.base.endpoint import allowed, is_loopback, split
from outrider.protocol.errors import Conflict, InvalidRequest, Overloaded
from outrider.protocol.sampling_params import Verification
from outrider.protocol.speculation import FinishReason
from outrider.security.error_interceptor import ErrorInterceptor
from outrider.testing import link_emulator as link_module
from outrider.testing.link_emulator import EmulatedLink, LinkShape
from outrider.v1 import common_pb2 as common
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


@pytest.mark.parametrize("kinds", ["chat,poems", "chat:0", "chat:nan", "chat:-1", "chat:many", "chat:1e9"])
def test_kinds_that_are_none_are_refused(kinds: str) -> None:
    with pytest.raises(InvalidRequest, match=r"kinds is .*, must be "):
        cases(kinds, 8)


def test_kinds_are_asked_by_their_weights() -> None:
    random.seed(1)
    asked = cases("chat:3,code", 8)
    picked = [pick(asked).prompt.kind for _ in range(4000)]
    assert picked.count("chat") + picked.count("code") == 4000
    assert 2900 < picked.count("chat") < 3100


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (Output("one two", (1, 2), 2), ""),
        (Output("one too", (1, 3), 2), "from character 5 on 'oo' instead of 'wo'"),
        (Output("one", (1,), 1), "from character 3 on '' instead of ' two'"),
        (Output("one two", (1, 2, 2), 3), "same text, different tokens from token 2 on"),
        (Output("one two", None, 2), ""),  # of a protocol that does not tell tokens
        (Output("one two", None, 3), "same text from 3 tokens instead of 2"),
        (Output("one too", None, 2), "from character 5 on 'oo' instead of 'wo'"),
    ],
)
def test_difference_says_where(got: Output, says: str) -> None:
    assert difference(Output("one two", (1, 2), 2), got) == says


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
        main(http_endpoint="10.0.0.1:8000", report=tmp_path)
    with pytest.raises(typer.BadParameter, match="--max-users"):
        main(users=20, shape="spike", times=3, max_users=50, report=tmp_path)
    with pytest.raises(typer.BadParameter, match="--allow-remote"):
        link_module.main(to="10.0.0.1:50051")
    with pytest.raises(typer.BadParameter, match="--allow-remote"):
        link_module.main(to="127.0.0.1:50051", listen="0.0.0.0:0")
    assert not list(tmp_path.iterdir())


# What a run may be.


def load(**changed: Any) -> Load:
    given = {
        "shape": "steady",
        "users": 4,
        "spawn_rate": 4.0,
        "seconds": 10,
        "times": 3.0,
        "grpc_share": 1.0,
        "http_share": 1.0,
        "kinds": "",
        "max_tokens": 8,
        "gamma": None,
    }
    return Load(**(given | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": "wave"},
        {"users": 0},
        {"spawn_rate": 0},
        {"seconds": 0},
        {"seconds": 25 * 3600},
        {"times": 0.5},
        {"times": float("nan")},
        {"times": 1000},
        {"grpc_share": -1},
        {"grpc_share": 0, "http_share": 0},
        {"max_tokens": 0},
        {"kinds": "poems"},
    ],
    ids=str,
)
def test_a_load_without_bounds_is_refused(changed: dict[str, Any]) -> None:
    load().check()
    with pytest.raises(InvalidRequest, match=next(iter(changed))):
        load(**changed).check()


def typed(**changed: Any) -> SimpleNamespace:
    """Options as locust has them, after its web page has changed some."""
    given = {
        "endpoint": "127.0.0.1:1",
        "http_endpoint": "127.0.0.1:2",
        "timeout_s": 5.0,
        "max_users": 9,
        "capacity": 0,
        "allow_remote": False,
        "shape": "steady",
        "num_users": 4,
        "spawn_rate": 4.0,
        "run_time": 10,
        "times": 3.0,
        "grpc_share": 1.0,
        "http_share": 1.0,
        "kinds": "",
        "max_tokens": 8,
        "gamma": "",
    }
    return SimpleNamespace(**(given | changed))


def test_options_become_a_load() -> None:
    assert Load.of(typed()) == load()
    assert Load.of(typed(gamma=" 3 ")).gamma == 3
    for gamma in ("-1", "65", "three", "1.5"):
        with pytest.raises(InvalidRequest, match="gamma"):
            Load.of(typed(gamma=gamma))


def test_where_load_goes_survives_the_way_to_workers() -> None:
    where = LoadTarget.of(typed(endpoint="127.0.0.1:1,127.0.0.1:3"))
    assert where.grpc == ("127.0.0.1:1", "127.0.0.1:3")
    assert LoadTarget.unpacked(msgpack.loads(msgpack.dumps(where.packed()))) == where
    for name in ("endpoint", "http_endpoint"):
        with pytest.raises(InvalidRequest, match="--allow-remote"):
            LoadTarget.of(typed(**{name: "10.0.0.1:1"}))


# Whole runs, against a coordinator that is made up.


class MadeUp(rpc.OutriderServicer):
    """Streams each prompt back, a word at a time; under load it does to some what `spoil` says."""

    def __init__(self, spoil: Callable[[str], str] = lambda asked: asked) -> None:
        self._spoil = spoil

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        return pb.ServerInfo(workers=[pb.Worker(role=pb.ROLE_VERIFIER, capacity=4)])

    async def GetModelInfo(self, request: common.GetModelInfoRequest, context: Any) -> common.ModelInfo:
        return common.ModelInfo(name="made up")

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
async def made_up(service: MadeUp) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor(30.0)])
    rpc.add_OutriderServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def test_keys_and_certificates_that_cannot_be_read_are_told_at_once(tmp_path: Path) -> None:
    for given in ({"api_key": f"@{tmp_path}/none"}, {"tls_ca": f"{tmp_path}/none"}, {"tls_cert": "only-one"}):
        with pytest.raises(typer.BadParameter, match=next(iter(given))):
            main(report=tmp_path, **given)
    assert not list(tmp_path.iterdir())


def test_results_that_cannot_be_written_are_told_before_the_load(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given in (
        {"report": tmp_path / "file"},
        {"report": tmp_path / "file" / "folder"},
        {"report": tmp_path / "new", "html": tmp_path},
        {"report": tmp_path / "new", "json": tmp_path},
        {"report": Path("/proc/results")},
    ):
        with pytest.raises(typer.BadParameter, match="cannot write "):
            main(**given)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "file"]


def test_locust_by_hand_makes_the_folder_of_its_summary_or_does_not_start(tmp_path: Path) -> None:
    """It wrote the summary after the run, into a folder that had to be there."""
    line = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--endpoint", "127.0.0.1:1"]
    done = [
        subprocess.run([*line, "--summary", str(path)], capture_output=True, text=True, check=False, timeout=60)
        for path in (tmp_path, tmp_path / "new" / "summary.json")
    ]
    assert [each.returncode for each in done] == [1, 1]
    assert f"cannot write {tmp_path}: Is a directory" in done[0].stderr
    assert "cannot write" not in done[1].stderr
    assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new" / "summary.json").exists()


async def run(endpoint: str, report: Path, **more: Any) -> int:
    """The exit code of a second under load."""
    given = {"users": 4, "spawn_rate": 4, "seconds": 1, "kinds": "chat", "http_share": 0} | more
    try:
        await asyncio.to_thread(main, endpoint=endpoint, report=report, **given)
    except typer.Exit as left:
        return left.exit_code
    return 0


async def test_a_run_of_right_texts_passes(tmp_path: Path) -> None:
    async with made_up(MadeUp()) as endpoint:
        assert await run(endpoint, tmp_path, timeout_s=9.5) == 0, "locust itself takes whole seconds only"
    summary = Summary.load_from(tmp_path / "summary.json")
    counts = summary.all
    assert counts.requests == counts.compared > 0
    assert (counts.failures, counts.shed, summary.recovery) == (0, 0, None)
    lengths = [len(prompt.chat[-1][1].split()) for prompt in PROMPTS if prompt.kind == "chat"]
    assert min(lengths) * counts.requests <= counts.tokens <= max(lengths) * counts.requests
    assert counts.first_token_ms.p50 is not None
    assert counts.total_ms.p50 is not None
    assert 0 < counts.first_token_ms.p50 <= counts.total_ms.p50
    assert [(part.name, part.users) for part in summary.parts] == [("steady", 4)]
    assert summary.tokens_per_s > 0
    assert {"report.html", "locust.html", "locust_stats.csv", "locust.log"} <= set(os.listdir(tmp_path))


async def test_a_run_with_wrong_texts_or_errors_fails(tmp_path: Path) -> None:
    heard = []

    def spoil(asked: str) -> str:
        heard.append(asked)
        if len(heard) == 3:
            raise Conflict("of no use")
        return f"{asked} brewery" if len(heard) == 1 else asked

    async with made_up(MadeUp(spoil)) as endpoint:
        assert await run(endpoint, tmp_path) == 1
    summary = Summary.load_from(tmp_path / "summary.json")
    assert set(summary.errors) == {TEXT_DIFFERS, "conflict"}
    assert summary.all.failures == sum(summary.errors.values()) < summary.all.requests
    log = (tmp_path / "locust.log").read_text()
    names = {case.prompt.chat[-1][1]: case.name for case in cases("chat", 8)}
    end = len(" ".join(heard[0].split())) + 1
    assert f"{names[heard[0]]}: text differs: from character {end} on 'brewery" in log
    assert f"{names[heard[2]]}: conflict: " in log


async def test_refusals_for_want_of_room_are_no_failures_and_tried_again(tmp_path: Path) -> None:
    heard: list[str] = []
    refused: list[int] = []  # of what was heard

    def spoil(asked: str) -> str:
        heard.append(asked)
        if heard.count(asked) == 1:
            refused.append(len(heard) - 1)
            raise Overloaded("full", retry_after_ms=10)
        return asked

    given = {"users": 1, "json": tmp_path / "a" / "figures.json", "html": tmp_path / "b.html"}
    async with made_up(MadeUp(spoil)) as endpoint:
        assert await run(endpoint, tmp_path, **given) == 0
    summary = Summary.load_from(tmp_path / "a" / "figures.json")
    assert summary.all.shed == len(refused) > 0
    assert (summary.all.failures, summary.verdict) == (0, "")
    assert all(heard[at] == again for at in refused for again in heard[at + 1 : at + 2]), "it is the one tried again"
    assert "Shed and failed per second" in (tmp_path / "b.html").read_text()


async def test_a_run_against_nobody_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await run(nobody, tmp_path) == 1
        assert not (tmp_path / "summary.json").exists()
        assert "cannot start: " in (tmp_path / "locust.log").read_text()
        async with made_up(MadeUp()) as endpoint:
            assert await run(endpoint, tmp_path, http_share=1, http_endpoint=nobody) == 1
    assert "--http-share 0 disables HTTP" in (tmp_path / "locust.log").read_text()
    shown = capsys.readouterr().out
    assert "cannot start: " in shown
    assert "Aggregated" not in shown, "locust's empty tables hide the reason"


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
async def linked(shape: LinkShape | None = None) -> AsyncIterator[tuple[Target, EmulatedLink]]:
    async with Target() as target, EmulatedLink("127.0.0.1", target.port, shape) as link:
        yield target, link


@contextlib.asynccontextmanager
async def connected(link: EmulatedLink) -> AsyncIterator[Streams]:
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


async def echo_once(link: EmulatedLink) -> None:
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
    async with linked(LinkShape(delay_ms=30)) as (_, link), connected(link) as streams:
        fastest = min([await echo(streams) for _ in range(5)])
        assert 0.060 <= fastest < 0.120
        link.shape = LinkShape()
        assert min([await echo(streams) for _ in range(5)]) < 0.030


async def test_delay_does_not_limit_throughput() -> None:
    data = b"z" * (64 * link_module.CHUNK)
    async with linked(LinkShape(delay_ms=50)) as (_, link), connected(link) as streams:
        reader, writer = streams
        reading = asyncio.create_task(reader.readexactly(len(data)))
        begun = time.perf_counter()
        writer.write(data)
        assert await asyncio.wait_for(reading, SOON_S) == data
        assert time.perf_counter() - begun < 64 * 0.050 / 2  # one chunk per delay would take twice that, each way


async def test_jitter_keeps_the_order() -> None:
    async with linked(LinkShape(jitter_ms=8)) as (_, link), connected(link) as (reader, writer):
        sent = b""
        for number in range(100):
            writer.write(piece := f"{number},".encode())
            await asyncio.sleep(0)
            sent += piece
        assert await asyncio.wait_for(reader.readexactly(len(sent)), SOON_S) == sent


async def test_jitter_spreads_the_delay() -> None:
    async with linked(LinkShape(delay_ms=5, jitter_ms=40)) as (_, link), connected(link) as streams:
        taken = [await echo(streams) for _ in range(12)]
        assert min(taken) >= 0.010
        assert max(taken) - min(taken) > 0.015


async def test_bandwidth_is_shared_by_the_connections() -> None:
    async with (
        linked(LinkShape(bytes_per_s=500_000)) as (_, link),
        connected(link) as one,
        connected(link) as two,
    ):
        begun = time.perf_counter()
        await asyncio.gather(echo(one, b"a" * 50_000), echo(two, b"b" * 50_000))
        assert 0.190 <= time.perf_counter() - begun < 2.0


async def test_a_window_holds_the_sender_back() -> None:
    shape = LinkShape(delay_ms=200, window_bytes=2 * link_module.CHUNK)
    data = b"w" * (6 * link_module.CHUNK)
    async with linked(shape) as (_, link), connected(link) as streams:
        assert await echo(streams, data) > 0.400 + 0.200


async def test_a_cut_resets_both_ends_and_new_connections_work() -> None:
    async with linked(LinkShape(delay_ms=1)) as (target, link), connected(link) as streams:
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
    async with linked(LinkShape(delay_ms=10)) as (target, link), connected(link) as (reader, writer):
        writer.write(b"last words")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), SOON_S) == b"last words"
        assert await asyncio.wait_for(target.ends.get(), SOON_S) == "closed"


async def test_a_target_that_is_not_there_resets_the_client() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with EmulatedLink("127.0.0.1", taken.getsockname()[1]) as link, connected(link) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(1), SOON_S)


async def test_leaving_a_link_ends_what_is_under_way() -> None:
    before = asyncio.all_tasks()
    async with Target() as target:
        async with EmulatedLink("127.0.0.1", target.port, LinkShape(delay_ms=60_000)) as link:
            reader, writer = await asyncio.open_connection(link.host, link.port)
            writer.write(b"never")
            assert await until(lambda: link.up._free_at > 0, SOON_S), "it is on its way"
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
        LinkShape(**given)


async def test_the_link_by_hand() -> None:
    async with Target() as target:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "outrider.testing.link_emulator",
                "--to",
                f"127.0.0.1:{target.port}",
                "--delay-ms",
                "5",
            ),
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
