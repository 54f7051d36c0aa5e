"""The three programs as an operator meets them: health, reflection, and clear words when something is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.base.grpc_options import channel_options
from outrider.launch.services import ServiceSpec
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.certificates import Authority
from tests.cluster import (
    ROOT,
    Cluster,
    Process,
    ask,
    client,
    environment,
    generate,
    known_workers,
    loads_torch,
    server_info,
    until,
)
from tests.conftest import Models
from tests.forking import Forked

pytestmark = pytest.mark.timeout(120)

SERVICES = {
    "coordinator": {"outrider.v1.Outrider", "outrider.v1.Registry"},
    "verifier": {"outrider.v1.Verifier"},
    "drafter": {"outrider.v1.Drafter"},
}


def run(module: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A program that is expected to end by itself; its output is both streams."""
    with tempfile.NamedTemporaryFile() as log:
        running = Forked(module, flags, log, ROOT, environment(**env), torch=loads_torch([module, *flags]))
        code = running.wait(60)
        return subprocess.CompletedProcess(running.args, code, stdout="", stderr=Path(log.name).read_text())


def assert_told(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("module", SERVICES)
def test_health_and_reflection(cluster: Cluster, module: str) -> None:
    process = next(process for process in cluster.processes if process.name.startswith(module))
    with grpc.insecure_channel(process.address, options=channel_options()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ["", *SERVICES[module]]:
            reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING, name
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([question]), timeout=5)
    listed = {service.name for service in answer.list_services_response.service}
    assert listed >= SERVICES[module] | {"grpc.health.v1.Health"}


def test_unknown_service_is_unknown_to_health(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.address, options=channel_options()) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("module", SERVICES)
def test_the_version_is_printed(module: str) -> None:
    done = run(module, "--version", OUTRIDER_OF_ANOTHER_RELEASE="1")
    assert (done.returncode, done.stderr) == (0, f"{version('outrider')}\n")


@pytest.mark.parametrize("flag", ["--api-keys", "--fleet-key", "--tls-ca"])
def test_a_pipe_with_a_key_is_not_waited_for(flag: str, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    value = str(pipe) if flag == "--tls-ca" else f"@{pipe}"
    started = run("coordinator", "--http-port", "-1", flag, value)
    assert_told(started, 1, f"{flag[2:].replace('-', '_')}: cannot read {pipe}: a pipe can be read only once")


def test_missing_model(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    assert_told(run("verifier", "--target", missing), 1, f"there is no model at {missing}")


def test_a_drafter_whose_config_has_values_of_other_types(models: Models, tmp_path: Path) -> None:
    folder = shutil.copytree(models.draft, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": "two"}))
    done = run("drafter", "--kind", "model", "--model", str(folder), "--device", "cpu")
    said = f"drafter: cannot load model '{folder}', its config.json or card.json cannot be used: "
    assert_told(done, 1, said, "'num_hidden_layers' expected int")


@pytest.mark.parametrize("command", [("coordinator", "--http-port", "-1"), ("verifier", "--engine", "mock")])
def test_no_room_for_temporary_files_is_told_in_a_sentence(command: Sequence[str]) -> None:
    """As in a container whose file system is read-only."""
    line = ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh", sys.executable, "-m", *command]  # no file can have a byte
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert_told(done, 1, f"{command[0]}: ", "No usable temporary directory")


FORKS = """
import outrider.base.no_torch
import asyncio, os, resource, subprocess
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

async def serve():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(health_pb2.HealthCheckRequest(), timeout=10)
        await asyncio.to_thread(int)  # its thread is there before there can be no other
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)  # root may have any number
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        for _ in range(3):
            try:
                await asyncio.to_thread(subprocess.run, ["true"])
            except BlockingIOError:
                await check(health_pb2.HealthCheckRequest(), timeout=10)
                print("serves on")
    os._exit(0)

asyncio.run(serve())
"""


def test_a_service_that_gets_no_process_serves_on() -> None:
    """A coordinator starts one that tries grammars; gRPC's handlers of forks hung it when that failed."""
    done = subprocess.run(
        [sys.executable, "-uc", FORKS], env=environment(), capture_output=True, timeout=40, check=False
    )
    assert done.stdout.count(b"serves on") == 3, done.stderr.decode()


def test_a_program_with_a_client_may_fork() -> None:
    """Without gRPC's handlers, calls of the child wait for ever."""
    code = "import os; from outrider import Client; Client(['127.0.0.1:1']); print(os.environ.keys())"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=40, check=True)
    assert b"GRPC_VERBOSITY" in done.stdout
    assert b"GRPC_ENABLE_FORK_SUPPORT" not in done.stdout


def test_a_drafters_model_says_what_kind_it_is(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    assert_told(run("drafter", "--target", "somebody/else", "--model", missing), 1, f"there is no model at {missing}")


def test_unknown_kind_of_drafter() -> None:
    assert_told(run("drafter", "--kind", "oracle"), 1, "oracle")


def test_unknown_flag() -> None:
    assert_told(run("coordinator", "--max-sesions", "3"), 2, "--max-sesions")


def test_unknown_environment_variable() -> None:
    assert_told(run("coordinator", OUTRIDER_MAX_SESIONS="3"), 2, "OUTRIDER_MAX_SESIONS")


def test_value_out_of_range() -> None:
    assert_told(run("coordinator", "--gamma-max", "65"), 2, "--gamma-max", "65")


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_told(
            run("coordinator", "--port", port, "--http-port", "-1", "--redis-url", "redis://127.0.0.1:1"),
            1,
            port,
            "in use",
        )


def test_http_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ("--port", "0", "--http-port", port, "--redis-url", "redis://127.0.0.1:1")
        assert_told(run("coordinator", *flags), 1, port, "--http-port")


def test_drafter_with_another_vocabulary_is_left_out(cluster: Cluster, models: Models) -> None:
    """It stays up and says why; the fleet goes on without it."""
    stranger = cluster.add_drafter("model", models.other_vocabulary)
    cluster.drafters.remove(stranger)
    try:
        stranger.start().wait_ready()
        until(lambda: "not registered" in stranger.log(), 20, "the drafter told why")
        assert "first at token id 257" in stranger.log()
        assert "<|extra|>" in stranger.log()
        assert stranger.address not in {worker.address for worker in known_workers(cluster.address)}
        assert stranger.alive
    finally:
        stranger.stop()


@pytest.fixture(scope="module")
def without_redis(models: Models, tmp_path_factory: pytest.TempPathFactory):
    """A fleet whose Redis was never started."""
    fleet = Cluster(tmp_path_factory.mktemp("without-redis"), redis=False)
    fleet.add_coordinator()
    fleet.add_verifier(models.target)
    fleet.start()
    yield fleet
    fleet.stop()


async def test_generates_without_redis(without_redis: Cluster, cluster: Cluster) -> None:
    request = ask("No Redis here. ", temperature=0.0, max_tokens=40, gamma=2)
    async with client(without_redis.address) as stub, client(cluster.address) as other:
        output = await generate(stub, request)
        others = [await generate(stub, request) for _ in range(2)]
        wanted = await generate(other, request)
        # It can still be read again here, and its key still holds here.
        resumed = [reply async for reply in stub.Resume(pb.ResumeRequest(session_id=output.session_id), timeout=10)]
    assert output.token_ids == wanted.token_ids
    quickest = min(each.stats.time_to_first_token_ms for each in (output, *others))
    assert quickest < 900, "nobody waited for Redis"
    assert [token for reply in resumed for token in reply.chunk.token_ids] == output.token_ids


def test_says_that_nothing_is_durable_without_redis(without_redis: Cluster, cluster: Cluster) -> None:
    assert not server_info(without_redis.address).durable
    assert server_info(cluster.address).durable


@pytest.fixture
def with_own_imports(tmp_path: Path) -> Iterator[list[Process]]:
    """Services without a model that load their libraries themselves."""
    fleet = Cluster(tmp_path, redis=False)
    processes = [fleet.add_coordinator(), fleet.add_drafter("ngram")]
    for process in processes:
        process.forked = False
        process.start()
    yield processes
    fleet.stop()


def test_services_without_a_model_load_no_torch(cluster: Cluster, with_own_imports: list[Process]) -> None:
    assert "libtorch" in Path(f"/proc/{cluster.drafters[0].pid}/maps").read_text()
    for process in with_own_imports:
        process.wait_ready()
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_coordinator_that_is_told_to_leave_ends_its_streams_without_a_trace_back(tmp_path: Path) -> None:
    """Registrations are open for as long as workers live."""
    fleet = Cluster(tmp_path, redis=False)
    process = fleet.add_coordinator().start().wait_ready()
    ended: list[grpc.RpcError] = []
    leave = threading.Event()

    def report(number: int) -> None:
        def says() -> Iterator[pb.RegisterRequest]:
            worker = pb.Worker(worker_id=f"w{number}", role=pb.ROLE_DRAFTER, address=f"127.0.0.1:{number + 1}")
            worker.model.name, worker.kind, worker.capacity = "any", "test", 1
            yield pb.RegisterRequest(worker=worker)
            leave.wait(30)

        with grpc.insecure_channel(process.address, options=channel_options()) as channel:
            try:
                for _ in rpc.RegistryStub(channel).Register(says(), timeout=30):
                    registered.release()
            except grpc.RpcError as error:
                ended.append(error)

    registered = threading.Semaphore(0)
    threads = [threading.Thread(target=report, args=(number,), daemon=True) for number in range(8)]
    try:
        for thread in threads:
            thread.start()
        assert all(registered.acquire(timeout=20) for _ in threads)
        process.terminate()
        assert process.wait(20) == 0
        leave.set()
        for thread in threads:
            thread.join(10)
    finally:
        leave.set()
        fleet.stop()
    assert {(error.code(), "shutting down" in (error.details() or "")) for error in ended} == {
        (grpc.StatusCode.UNAVAILABLE, True)
    }
    assert len(ended) == len(threads)
    assert "stopped" in process.log()
    assert "Traceback" not in process.log()


@pytest.mark.parametrize(
    ("flags", "engine"),
    [
        (("--engine", "native"), "native"),
        (("--engine", "transformers"), "transformers"),
    ],
)
def test_the_engine_that_is_named_serves(models: Models, tmp_path: Path, flags: tuple[str, ...], engine: str) -> None:
    cluster = Cluster(tmp_path)
    verifier = cluster.add_verifier(models.target, "--log-json", *flags)
    try:
        verifier.start().wait_ready()
    finally:
        verifier.stop()
    assert f"progress: engine {engine} on cpu, weights in float32" in verifier.log()
    assert '"event": "deprecated option"' not in verifier.log()


def test_an_engine_that_cannot_run_ends_the_start(models: Models) -> None:
    target = ("--target", str(models.target), "--device", "cpu")
    assert_told(run("verifier", *target, "--engine", "cuda"), 1, "engine cuda cannot run", "on cpu")
    assert_told(run("verifier", *target, "--engine", "native", "--dtype", "float16"), 1, "weights in float16")
    assert_told(run("verifier", *target, OUTRIDER_COMPILE="off"), 2, "OUTRIDER_COMPILE")
    assert_told(run("verifier", *target, "--engine", "quick"), 2, "--engine")


def test_a_drafter_without_a_model_takes_no_engine() -> None:
    assert_told(run("drafter", "--kind", "suffix", "--engine", "native"), 1, "kind suffix runs no engine")
    assert_told(run("drafter", "--kind", "suffix", "--engine", "mock"), 1, "must be mock with --engine mock")


@contextlib.contextmanager
def started(*command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A program that heeds all signals, also where these tests run with some ignored, as under `nohup`."""
    ignored = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        running = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment(**env),
        )
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("module", ["verifier", "drafter"])
def test_ctrl_c_while_a_model_is_loaded_ends_it(models: Models, module: str) -> None:
    model = ["--kind", "model", "--model", str(models.draft)] if module == "drafter" else []
    with started(module, "--target", str(models.target), *model) as loading:
        assert loading.stdout is not None
        assert any("loading" in line for line in loading.stdout)
        loading.send_signal(signal.SIGINT)
        rest, _ = loading.communicate(timeout=60)
    # Shells say 130 of both. Where the signal comes after all was loaded, the service has drained.
    assert loading.returncode in (130, -signal.SIGINT) or ("draining" in rest and loading.returncode == 0)
    assert "Event loop is closed" not in rest


_OUTRIDER = (sys.executable, "-P", "-c", "from outrider.cli import main; main()")


@pytest.mark.parametrize(
    "line",
    [(*_OUTRIDER, "serve", "coordinator"), ServiceSpec("coordinator-1", "coordinator", CoordinatorSettings()).command],
    ids=["serve", "up"],
)
def test_modules_in_the_folder_of_the_start_are_not_run(line: Sequence[str], tmp_path: Path) -> None:
    """As in /tmp, where every user can put a `structlog.py`; a newcomer's own `redis.py` would do, too."""
    for name in ("coordinator", "outrider", "structlog", "redis"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not the module that was meant')")
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run([*line, "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-sessions" in done.stdout


@pytest.mark.parametrize("line", [(*_OUTRIDER, "serve", "coordinator"), (sys.executable, "-m", "coordinator")])
def test_a_command_without_a_standard_output_ends_with_no_error(line: Sequence[str]) -> None:
    """As where a supervisor has closed it: logs go to the other one."""
    closed = ("sh", "-c", 'exec "$@" >&-', "sh", *line, "--help")
    done = subprocess.run(closed, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_address_is_told_before_a_model_is_loaded() -> None:
    assert_told(run("verifier", "--coordinators", "here"), 1, "coordinators is 'here', must be host:port")


def test_a_closed_terminal_ends_a_service_in_order(short_path: Path) -> None:
    with started("coordinator", "--port", "0", "--http-port", "-1", TMPDIR=str(short_path)) as serving:
        assert serving.stdout is not None
        assert any("serving" in line for line in serving.stdout)
        serving.send_signal(signal.SIGHUP)
        rest, _ = serving.communicate(timeout=60)
    assert "draining" in rest
    assert serving.returncode == 0
    assert not list(short_path.glob("outrider-redis-*")), "prompts are in it"


def test_a_failed_handshake_leaves_the_log_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's core writes a line of its own for each, unless it was told before it was imported."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)  # which this process has set for itself
    mine = Authority.make(tmp_path).issue("mine")
    tls = ("--tls-cert", str(mine.cert), "--tls-key", str(mine.key), "--log-json")
    with started("coordinator", "--http-port", "-1", "--redis-url", "redis://127.0.0.1:1", *tls) as serving:
        assert serving.stdout is not None
        ready = next(line for line in serving.stdout if line.startswith("progress: ready at "))
        with socket.create_connection(("127.0.0.1", int(ready.rpartition(":")[2])), timeout=10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(1) == b"", "the handshake has failed"
        serving.send_signal(signal.SIGTERM)
        rest, _ = serving.communicate(timeout=60)
    assert {json.loads(line)["service"] for line in rest.splitlines()} == {"coordinator"}


@pytest.mark.parametrize("url", ["redis://:sec/ret@127.0.0.1:1/0", "redis://:sec#ret@h:1/0", "redis://h:1/0?sec=ret"])
def test_a_wrong_redis_url_is_told_without_its_password(url: str) -> None:
    done = run("coordinator", "--port", "0", "--http-port", "-1", REDIS_URL=url)
    assert_told(done, 1, "redis_url is no URL of Redis", "percent-encode")
    assert "sec" not in done.stderr
