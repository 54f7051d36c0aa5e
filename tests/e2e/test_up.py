"""`outrider up` as it is used: from a script, with a Redis that dies, ended by Ctrl-C, started again."""

from __future__ import annotations

import os
import re
import select
import signal
from pathlib import Path

import pytest
import redis

from outrider.client.sync import Client
from outrider.protocol.errors import PeerLost
from outrider.protocol.sampling_params import SamplingParams
from outrider.security.tls import Tls
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import Output, Redis, ask, client, generate, until, until_async
from tests.conftest import Models
from tests.e2e.up import Up, command_line, up

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc"),
]


def sessions_in(server: int) -> dict[bytes, object]:
    """Return what Redis holds of finished sessions. Its title says where it listens."""
    path = command_line(server).rpartition("unixsocket:")[2]
    with redis.Redis(unix_socket_path=path) as asking:
        finished = [key for key in asking.scan_iter("outrider:session:*") if asking.hget(key, "finish")]
        records: dict[bytes, object] = {key: asking.hgetall(key) for key in finished}
        texts = [key.replace(b":session:", b":tokens:") for key in finished]
        return records | {key: asking.get(key) for key in texts}


def service(running: Up, kind: str) -> int:
    """Return the id of the only service of this kind; 0: there is none."""
    return next((pid for pid in running.family() if f"-m {kind}" in command_line(pid)), 0)


def wait_for_ends(running: Up) -> None:
    """Wait until all its processes have ended. Redis must be the last but for `up` itself."""
    server = running.redis()
    handles = {pid: os.pidfd_open(pid) for pid in running.family()}
    try:
        os.killpg(running.process.pid, signal.SIGINT)
        assert select.select([handles[server]], [], [], 40)[0], "Redis did not end"
        others = [pid for pid in handles if pid not in (server, running.pid)]
        assert len(others) >= 3
        for pid in others:
            assert select.select([handles[pid]], [], [], 0)[0], f"Redis ended before {command_line(pid)}"
    finally:
        for handle in handles.values():
            os.close(handle)


async def test_redis_is_started_again_ends_last_and_its_sessions_stay(models: Models, tmp_path: Path) -> None:
    """All of it in one life: to start takes seconds."""
    flags = ["--target", str(models.target), "--drafter", "ngram", "--state-dir", str(tmp_path / "state")]
    flags.append("--drafter-apart")
    with up(tmp_path, *flags, in_background=True) as running:
        address = running.ready()
        first = running.redis()
        assert os.getsid(first) == first, "Ctrl-C reaches it"
        async with client(address) as stub:
            finished = await generate(stub, ask("Hello", max_tokens=8))
            before = await until_async(lambda: _kept(finished, first), 10, "record in Redis")

            os.kill(first, signal.SIGKILL)
            second = until(lambda: running.redis() not in (0, first) and running.redis(), 20, "another Redis")
            running.said(r"(embedded redis restarted)")
            assert re.search(r"embedded redis ended, restarting\s+status=SIGKILL", running.log.read_text())
            assert sessions_in(second).items() >= before.items(), "the new one has what the old one had"
            await until_async(lambda: _durable(stub), 20, "the coordinator uses it")
            after = await generate(stub, ask("Hello again", max_tokens=8))
            drafter = service(running, "drafter")
            os.kill(drafter, signal.SIGKILL)
            running.said(r"drafter-1 (died by signal 9 \(Killed\), restarting)")
            assert until(lambda: service(running, "drafter") not in (0, drafter), 20, "another drafter")

            end = await until_async(lambda: _kept(after, second), 10, "record in the new one")

        wait_for_ends(running)
        assert running.process.wait(20) == 0, running.log.read_text()
        assert "stopped" in running.log.read_text()
    with up(tmp_path, *flags) as running:
        # That they can be resumed takes a verifier: test_up_restart.py.
        running.said(r"(coordinator-1: starting)")  # Redis answers before
        assert sessions_in(running.redis()).items() >= {**before, **end}.items()


async def _kept(output: Output, server: int) -> dict[bytes, object]:
    found = sessions_in(server)
    return found if any(output.session_id.encode() in key for key in found) else {}


async def _durable(stub: rpc.OutriderStub) -> bool:
    return bool((await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)).durable)


@pytest.mark.parametrize(
    ("command", "url", "cause"),
    [
        ("REPLICAOF 127.0.0.1 1", "redis://{}", "ReadOnlyError"),
        ("CONFIG SET requirepass right", "redis://:wrong-one@{}", "AuthenticationError: invalid"),
        ("CONFIG SET maxmemory 1", "redis://{}", "OutOfMemoryError"),
        ("ECHO well", "redis://127.0.0.1:1", "ConnectionError: Error 111"),
        ("ECHO well", "http://{}", "not a valid URL"),
        ("ECHO well", ":wrong-one@{}", "not a valid URL"),
    ],
)
def test_a_redis_that_cannot_be_used_ends_it_with_the_reason(
    tmp_path: Path, models: Models, command: str, url: str, cause: str
) -> None:
    """It said that it was ready, and kept no sessions."""
    server = Redis(tmp_path).start().wait_ready(10)
    try:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command(*command.split())  # type: ignore[no-untyped-call]
        given = url.format(server.address)
        with up(tmp_path, "--target", str(models.target), REDIS_URL=given) as running:
            assert running.process.wait(60) == 1
            said = running.log.read_text()
    finally:
        server.stop()
    (line,) = (line for line in said.splitlines() if cause in line)
    assert f"Redis cannot be used at {given.replace(':wrong-one@', '')}: {cause}" in line
    assert "wrong-one" not in said
    assert "Traceback" not in said


CONFIG = """
drafter = "ngram"
target = "{target}"
tls = true
[coordinator]
max-sessions = 7
[verifier]
max-sessions = 5
metrics-key = "secret-of-metrics"
[verifier-1]
prefix-tokens = 0
"""


def test_settings_of_services_and_tls(models: Models, tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(CONFIG.format(target=models.target))
    ca = tmp_path / "state" / "tls" / "ca.pem"
    line = ["--config", str(file), "--set", "verifier.max-sessions=6", "--state-dir", str(tmp_path / "state")]
    with up(tmp_path, *line, OUTRIDER_GAMMA_MAX="3") as running:
        address = running.ready()
        running.said(f"({re.escape(f'--endpoint {address} --tls-ca {ca}')})")
        assert "OUTRIDER_GAMMA_MAX is not read here: --set coordinator.gamma-max" in running.log.read_text()
        with Client([address], tls=Tls.load(ca=str(ca))) as client:
            capacities = {worker.kind: worker.capacity for worker in client.server().workers}
            assert capacities == {"target": 6, "ngram": 6}, "its drafter is in the verifier's process"
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            assert len(client.complete("Hello", params=params).token_ids) == 4
        with Client([address]) as client, pytest.raises(PeerLost):
            client.server()
        verifier = service(running, "verifier")
        assert "--max-sessions 6 " in command_line(verifier)
        assert "--prefix-tokens 0 " in command_line(verifier)
        assert b"secret-of-metrics" in (Path("/proc") / str(verifier) / "environ").read_bytes()
        assert not [pid for pid in running.family() if "secret" in command_line(pid)]


def test_a_wrong_setting_starts_nothing(tmp_path: Path) -> None:
    with up(tmp_path, "--set", "coordinator.max-sesions=3") as running:
        assert running.process.wait(60) == 1
    assert running.log.read_text().splitlines() == [
        "outrider: --set coordinator.max-sesions: max-sesions is not a setting of coordinator; "
        "did you mean max-sessions?"
    ]
