"""Nobody gets in without a key or in plain text: every RPC of every service, and a fleet that works all the same."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
import pytest_asyncio
import redis
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from coordinator.api.service import CoordinatorService
from coordinator.workers.worker_connection import worker_error
from outrider.base.aio import until as soon
from outrider.base.endpoint import split
from outrider.client.aio import AsyncClient
from outrider.client.sync import Client
from outrider.engine.loading.loader import LoadedModel
from outrider.launch.stack import LaunchPlan, Stack
from outrider.protocol.errors import PeerLost, Unauthenticated, Unavailable
from outrider.protocol.sampling_params import SamplingParams
from outrider.runtime.embedded_redis import embedded_redis
from outrider.security.api_keys import ApiKeys
from outrider.security.channels import PLAIN, Channels
from outrider.security.tls import Tls
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2, drafter_pb2, verifier_pb2, verifier_pb2_grpc
from tests.certificates import Authority
from tests.cluster import (
    ROOT,
    SLOW,
    START_S,
    Cluster,
    ask,
    client,
    environment,
    free_port,
    generate,
    in_process,
    server_info,
    until,
)
from tests.conftest import Models
from tests.contract.conftest import after_joining, drafter_serving, verifier_serving
from tests.contract.test_processes import SERVICES, assert_told, run

pytestmark = pytest.mark.timeout(120)

API_KEY = "key-of-a-client"
FLEET_KEY = "secret-of-the-fleet"
DRAFTER_KEY = "secret-of-the-drafters"
REDIS_PASSWORD = "secret-of-redis"
NO_REDIS = "redis://127.0.0.1:1"  # where it would tell of other tests' workers
OUTRIDER = (sys.executable, "-c", "from outrider.cli.app import main; main()")
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
REPEATING = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
# As generated, so that a new RPC is asked for a key here without anybody thinking of it.
METHODS = [
    method
    for module in (coordinator_pb2, verifier_pb2, drafter_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@dataclass(frozen=True, slots=True)
class Guarded:
    """Where each service listens, and the key that opens it."""

    addresses: dict[str, str]
    service: CoordinatorService

    def address(self, method: MethodDescriptor) -> str:
        return self.addresses[method.containing_service.full_name]


def right_key(method: MethodDescriptor) -> str:
    clients = ("outrider.v1.Outrider", "outrider.v1.Attachment")
    return API_KEY if method.containing_service.full_name in clients else FLEET_KEY


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """All services, each behind its keys; the API keys are two, and the fleet's are about to be changed."""
    settings = CoordinatorSettings(
        http_port=0, api_keys=f"another,{API_KEY}", fleet_key=f"{FLEET_KEY},older", open_timeout_s=1.0
    )
    async with AsyncExitStack() as exits:
        service = CoordinatorService(settings, NO_REDIS)
        coordinator = await exits.enter_async_context(in_process(service, settings))
        reports = {"coordinators": coordinator, "open_timeout_s": 1.0}
        verifier = await exits.enter_async_context(
            verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), fleet_key=FLEET_KEY, **reports)
        )
        # Still with the old one first: both are taken while they are changed.
        drafter = await exits.enter_async_context(
            drafter_serving(kind="ngram", fleet_key=f"older,{FLEET_KEY}", **reports)
        )
        assert await soon(lambda: service.ready() and len(service.sessions.worker_pool.connections()) == 2, 20)
        yield Guarded(
            {
                "outrider.v1.Outrider": coordinator,
                "outrider.v1.Attachment": coordinator,
                "outrider.v1.Registry": coordinator,
                "outrider.v1.Verifier": verifier,
                "outrider.v1.Drafter": drafter,
            },
            service,
        )


async def status(address: str, method: MethodDescriptor, access: Channels) -> grpc.StatusCode:
    """How one call with an empty message ends."""
    kinds = {False: "unary", True: "stream"}
    message = message_factory.GetMessageClass(method.input_type)
    async with access.aio_channel(address) as channel:
        start = getattr(channel, f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}")(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=message.SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )

        call = start(timeout=20) if method.client_streaming else start(message(), timeout=20)
        try:
            if method.client_streaming:
                await call.write(message())
            if method.server_streaming:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
async def test_every_call_needs_the_right_key(guarded: Guarded, method: MethodDescriptor) -> None:
    address = guarded.address(method)
    right = right_key(method)
    not_for_this = FLEET_KEY if right == API_KEY else API_KEY
    for wrong in ("", "nonsense", right[:-1], not_for_this):
        assert await status(address, method, Channels(key=wrong)) is UNAUTHENTICATED, wrong
    assert await status(address, method, Channels(key=right)) is not UNAUTHENTICATED


@pytest.mark.parametrize("service", ["outrider.v1.Outrider", "outrider.v1.Verifier", "outrider.v1.Drafter"])
async def test_probes_need_no_key_and_reflection_does(guarded: Guarded, service: str) -> None:
    async with PLAIN.aio_channel(guarded.addresses[service]) as channel:
        # In process nobody serves health; what matters is that it is not a key that is missing.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.ServerReflectionInfo(iter([question]), timeout=5):
                pass
        assert caught.value.code() is UNAUTHENTICATED


async def test_reflection_needs_no_key_where_clients_need_none() -> None:
    """`outrider up` has a fleet key, but no API keys: tools such as grpcurl and Postman ask for the contract there."""
    settings = CoordinatorSettings(http_port=-1, fleet_key=FLEET_KEY)
    service = CoordinatorService(settings, NO_REDIS)
    async with in_process(service, settings) as coordinator, PLAIN.aio_channel(coordinator) as channel:
        for version in ("v1", "v1alpha"):  # in process nobody serves it, as above
            ask = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            assert await ask(iter([b""]), timeout=5).code() is grpc.StatusCode.UNIMPLEMENTED, version
        (register,) = (method for method in METHODS if method.name == "Register")
        assert await status(coordinator, register, PLAIN) is UNAUTHENTICATED
        service.api_keys.replace_by(ApiKeys([API_KEY]))
        assert await ask(iter([b""]), timeout=5).code() is UNAUTHENTICATED, "from now on clients need a key"


async def test_clients_are_told_what_is_missing(guarded: Guarded, loaded: LoadedModel) -> None:
    address = guarded.addresses["outrider.v1.Outrider"]
    async with AsyncClient([address]) as stranger:
        with pytest.raises(Unauthenticated, match="Bearer KEY"):
            await stranger.complete("Hello")
    async with AsyncClient([address], api_key=API_KEY) as client:
        with after_joining(loaded, guarded.service):
            made = await client.complete("ab ab ab ab", params=REPEATING, gamma=2)
        assert made.finished.stats.draft_tokens > 0, "the drafter, too, let the coordinator in"


async def test_a_worker_with_a_wrong_key_says_so_and_keeps_trying() -> None:
    port = free_port()

    def settings(key: str) -> CoordinatorSettings:
        return CoordinatorSettings(http_port=0, fleet_key=key, port=port)

    with capture_logs() as logs:

        def told() -> list[Any]:
            return [entry for entry in logs if entry["event"] == "not registered" and "valid key" in entry["error"]]

        async with AsyncExitStack() as life_of_the_drafter:
            strict = CoordinatorService(settings("right"), NO_REDIS)
            async with in_process(strict, settings("right")) as address:
                drafter = drafter_serving(kind="ngram", fleet_key="wrong", coordinators=address)
                await life_of_the_drafter.enter_async_context(drafter)
                assert await soon(lambda: bool(told()), 10)
                assert strict.sessions.worker_pool.connections() == []
            assert [entry["log_level"] for entry in told()] == ["error"], "once, and loud"
            assert "--fleet-key" in told()[0]["error"], "the flag to set"
            assert "--drafter-key" in told()[0]["error"]
            assert "wrong" not in str(logs)
            # The operator gives the coordinator the key that the worker has.
            mended = CoordinatorService(settings("wrong"), NO_REDIS)
            async with in_process(mended, settings("wrong")):
                assert await soon(lambda: len(mended.sessions.worker_pool.connections()) == 1, 10)
                await life_of_the_drafter.aclose()


async def test_strangers_that_say_nothing_are_not_waited_for(guarded: Guarded) -> None:
    async with PLAIN.aio_channel(guarded.addresses["outrider.v1.Verifier"]) as channel:
        calls = [verifier_pb2_grpc.VerifierStub(channel).Verify(timeout=20) for _ in range(48)]
        async with asyncio.timeout(10):
            assert [await call.code() for call in calls] == [UNAUTHENTICATED] * len(calls)


NOT_TAKEN = "does not accept this coordinator's fleet key"


async def test_a_verifier_that_asks_for_another_key_is_not_let_in(loaded: LoadedModel, tmp_path: Path) -> None:
    settings = CoordinatorSettings(http_port=0)
    service = CoordinatorService(settings, NO_REDIS)
    with capture_logs() as logs:
        async with (
            in_process(service, settings) as coordinator,
            verifier_serving(loaded, tmp_path, fleet_key="own", coordinators=coordinator),
        ):
            assert await soon(lambda: any(NOT_TAKEN in str(entry.get("error")) for entry in logs), 10)
            assert service.sessions.worker_pool.connections() == []


async def test_what_a_worker_asks_of_a_coordinator_is_no_fault_of_clients(loaded: LoadedModel, tmp_path: Path) -> None:
    """A second verifier is let in unasked, for its target is known. Clients must not hear that a key is wrong."""
    settings = CoordinatorSettings(http_port=0, worker_wait_s=0.5)
    service = CoordinatorService(settings, NO_REDIS)
    with capture_logs() as logs:
        async with (
            in_process(service, settings) as coordinator,
            AsyncExitStack() as others,
            client(coordinator) as stub,
        ):
            good = verifier_serving(loaded, tmp_path / "good", coordinators=coordinator)
            await others.enter_async_context(good)
            assert await soon(lambda: service.ready(), 10)
            bad = verifier_serving(loaded, tmp_path / "bad", coordinators=coordinator, fleet_key="own")
            async with bad:
                assert await soon(lambda: len(service.sessions.worker_pool.connections()) == 2, 10)
                assert await soon(lambda: any(NOT_TAKEN in str(entry.get("reason")) for entry in logs), 10)
                assert (await generate(stub, ask("Hello", max_tokens=8, ignore_eos=True))).finished
                await others.aclose()
                with pytest.raises(Unavailable):
                    await generate(stub, ask("Hello", max_tokens=8))
    assert [entry["log_level"] for entry in logs if NOT_TAKEN in str(entry.get("reason"))] == ["warning"]


def test_a_stream_that_a_worker_refuses_may_be_tried_elsewhere() -> None:
    """Before a probe has found out: the client hears Unavailable, which sends it on, not that its own key is wrong."""
    nothing = grpc.aio.Metadata()
    error = worker_error("bigbox:1", grpc.aio.AioRpcError(UNAUTHENTICATED, nothing, nothing, details="no key"))
    assert isinstance(error, Unavailable)
    assert error.message.startswith(f"bigbox:1 {NOT_TAKEN}")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs a machine with IPv6")
async def test_a_coordinator_listens_on_an_address_of_ipv6() -> None:
    settings = CoordinatorSettings(host="::1", http_port=0)
    service = CoordinatorService(settings, NO_REDIS)
    async with in_process(service, settings) as address:
        async with AsyncClient([f"[::1]:{address.rpartition(':')[2]}"]) as client:
            assert (await client.server()).coordinator_id
        async with httpx.AsyncClient() as web:
            assert (await web.get(f"http://{service.http_address}/health")).status_code == 200


# TLS.


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("certificates"))


def tls_flags(authority: Authority, name: str) -> dict[str, Any]:
    mine = authority.issue(name)
    return {"tls_cert": str(mine.cert), "tls_key": str(mine.key), "tls_ca": str(authority.path)}


async def refused(address: str, tls: Tls | None) -> None:
    async with AsyncClient([address], tls=tls) as client:
        with pytest.raises(PeerLost):
            await client.server()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def encrypted(authority: Authority) -> AsyncIterator[str]:
    settings = CoordinatorSettings(http_port=0, **tls_flags(authority, "encrypted"))
    async with in_process(CoordinatorService(settings, NO_REDIS), settings) as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mutual(authority: Authority) -> AsyncIterator[str]:
    settings = CoordinatorSettings(http_port=0, **tls_flags(authority, "mutual"), tls_client_auth=True)
    async with in_process(CoordinatorService(settings, NO_REDIS), settings) as address:
        yield address


async def test_tls(encrypted: str, authority: Authority, tmp_path: Path) -> None:
    async with AsyncClient([encrypted], tls=Tls.load(ca=str(authority.path))) as client:
        assert (await client.server()).coordinator_id
    await refused(encrypted, None)
    await refused(encrypted, Tls.load(ca=str(Authority.make(tmp_path, "impostor").path)))
    await refused(encrypted, Tls())  # public authorities know nothing of it


async def test_mtls(mutual: str, authority: Authority, tmp_path: Path) -> None:
    mine = authority.issue("caller")
    stranger = Authority.make(tmp_path, "stranger").issue("caller")
    ca = str(authority.path)
    async with AsyncClient([mutual], tls=Tls.load(cert=str(mine.cert), key=str(mine.key), ca=ca)) as client:
        assert (await client.server()).coordinator_id
    await refused(mutual, None)
    await refused(mutual, Tls.load(ca=ca))
    await refused(mutual, Tls.load(cert=str(stranger.cert), key=str(stranger.key), ca=ca))


async def test_silent_connections_keep_nobody_from_the_encrypted_http_port(authority: Authority) -> None:
    """They count from their start: one that begins no handshake gives way to a new one, and ends in time."""
    settings = CoordinatorSettings(http_port=0, max_connections=8, open_timeout_s=3.0, **tls_flags(authority, "silent"))
    service = CoordinatorService(settings, NO_REDIS)
    async with in_process(service, settings):
        host, port = split(service.http_address)
        silent = [await asyncio.open_connection(host, port) for _ in range(24)]
        context = ssl.create_default_context(cafile=str(authority.path))
        async with httpx.AsyncClient(verify=context, timeout=2) as web:
            assert (await web.get(f"https://{service.http_address}/health")).status_code == 200
        assert await soon(lambda: sum(reader.at_eof() for reader, _ in silent) >= 24 - 8, 2)
        assert await soon(lambda: all(reader.at_eof() for reader, _ in silent), 6)
        for _, writer in silent:
            writer.close()


async def test_a_certificate_for_another_address_is_refused(authority: Authority) -> None:
    elsewhere = authority.issue("elsewhere", address="192.0.2.1")
    settings = CoordinatorSettings(
        http_port=0, tls_cert=str(elsewhere.cert), tls_key=str(elsewhere.key), tls_ca=str(authority.path)
    )
    async with in_process(CoordinatorService(settings, NO_REDIS), settings) as address:
        await refused(address, Tls.load(ca=str(authority.path)))


# Everything on, in processes of their own.


@dataclass(frozen=True, slots=True)
class Secured:
    cluster: Cluster
    flags: tuple[str, ...]  # of a client
    variables: dict[str, str]


@pytest.fixture(scope="module")
def secured(models: Models, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    (folder / "api-keys").write_text(f"# clients\nanother\n{API_KEY}\n")
    (folder / "fleet-key").write_text(f"{FLEET_KEY}\n")
    mine = authority.issue("fleet")
    files = {"cert": str(mine.cert), "key": str(mine.key), "ca": str(authority.path)}
    common = [part for name, path in files.items() for part in (f"--tls-{name}", path)]
    cluster = Cluster(
        folder,
        flags=[*common, "--tls-client-auth", "--fleet-key", f"@{folder / 'fleet-key'}"],
        access=Channels(Tls.load(**files), API_KEY),
    )
    cluster.add_coordinator("--api-keys", f"@{folder / 'api-keys'}")
    cluster.add_verifier(models.target, *SLOW)
    cluster.add_drafter("model", models.draft)
    cluster.start()
    (folder / "api-key").write_text(API_KEY)
    variables = {f"OUTRIDER_TLS_{name.upper()}": path for name, path in files.items()}
    yield Secured(cluster, (*common, "--api-key", f"@{folder / 'api-key'}"), variables)
    cluster.stop()


def test_a_fleet_with_everything_on_says_the_same(secured: Secured, cluster: Cluster) -> None:
    address, access = secured.cluster.address, secured.cluster.access
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)
    with Client([address], api_key=API_KEY, tls=access.tls) as client, Client([cluster.address]) as plain:
        said = plain.complete("Nobody listens in. ", params=params, gamma=4).token_ids

        def drafted() -> int:
            made = client.complete("Nobody listens in. ", params=params, gamma=4)
            assert made.token_ids == said
            return made.finished.stats.draft_tokens

        until(drafted, 20, "the drafter takes part")
    assert {worker.address for worker in server_info(address, access).workers} == {
        process.address for process in (*secured.cluster.verifiers, *secured.cluster.drafters)
    }


def test_each_of_key_and_certificate_is_asked_for(secured: Secured) -> None:
    address, tls = secured.cluster.address, secured.cluster.access.tls
    assert tls is not None
    with Client([address], api_key="wrong", tls=tls) as client, pytest.raises(Unauthenticated):
        client.server()
    for incomplete in (None, Tls(ca=tls.ca)):
        with Client([address], api_key=API_KEY, tls=incomplete) as client, pytest.raises(PeerLost):
            client.server()


def test_reflection_opens_to_any_of_the_keys(secured: Secured) -> None:
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    for key in (API_KEY, FLEET_KEY):
        with Channels(secured.cluster.access.tls, key).channel(secured.cluster.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (answer,) = stub.ServerReflectionInfo(iter([question]), timeout=5)
        listed = {service.name for service in answer.list_services_response.service}
        assert listed >= SERVICES["coordinator"]


def outrider(*line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OUTRIDER, *line],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
        timeout=60,
        check=False,
    )


def test_the_command_line_shows_key_and_certificate(secured: Secured) -> None:
    line = ["generate", "Hello", "--endpoint", secured.cluster.address, "--max-tokens", "4", "--temperature", "0"]
    done = outrider(*line, *secured.flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert_told(outrider(*line, OUTRIDER_API_KEY="wrong", **secured.variables), 1, "a valid key is needed")


def test_the_health_check_speaks_tls(secured: Secured) -> None:
    def check(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "deploy/healthcheck.py", secured.cluster.address, "outrider.v1.Outrider"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment(PYTHONPATH=str(ROOT), **variables),
            timeout=30,
            check=False,
        )

    assert check(**secured.variables).returncode == 0
    assert_told(check(), 1, "UNAVAILABLE")
    assert_told(check(**secured.variables | {"OUTRIDER_TLS_CA": "/missing.pem"}), 1, "/missing.pem")


# What an operator gets to read.


def test_a_door_left_open_is_told_at_start() -> None:
    done = run("coordinator", "--redis-url", "redis://127.0.0.1:1", OUTRIDER_API_KEYS="s3cret")
    assert_told(done, 1, "api_keys are given without fleet_key")
    assert "s3cret" not in done.stdout + done.stderr


def test_files_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    flags = ("--target", str(tmp_path / "no-model"), "--tls-cert", missing, "--tls-key", missing)
    assert_told(run("verifier", *flags), 1, f"tls_cert: cannot read {missing}")


@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_up_keeps_secrets_off_command_lines(models: Models, tmp_path: Path, redis_with_password: str) -> None:
    """Each service has those that it needs and no other, where only its user can read them."""
    keys = {"OUTRIDER_API_KEYS": f"{API_KEY},other", "OUTRIDER_FLEET_KEY": FLEET_KEY}
    keys |= {"OUTRIDER_DRAFTER_KEY": DRAFTER_KEY, "REDIS_URL": redis_with_password}
    secrets = {"verifier": {FLEET_KEY}, "drafter": {DRAFTER_KEY}}
    secrets["coordinator"] = {FLEET_KEY, DRAFTER_KEY, API_KEY, REDIS_PASSWORD}
    flags = ["--port", "0", "--http-port", "0", "--target", str(models.target), "--drafter", "ngram"]
    flags += ["--device", "cpu", "--threads", "1", "--drafter-apart"]
    with (tmp_path / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [*OUTRIDER, "up", *flags], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment(**keys)
        )
    try:
        said = until(lambda: _ready((tmp_path / "up.log").read_text()), 2 * START_S, "ready")
        processes = {pid: (Path("/proc") / pid / "cmdline").read_bytes() for pid in _children(up.pid)}
        services = {
            name: pid for pid, line in processes.items() for name in SERVICES if f"-m\0{name}\0".encode() in line
        }
        assert set(services) == set(SERVICES)
        for name, pid in services.items():
            variables = (Path("/proc") / pid / "environ").read_bytes()
            for secret in secrets["coordinator"]:
                assert secret.encode() not in processes[pid]
                assert (secret.encode() in variables) == (secret in secrets[name]), (name, secret)
        with Client([said]) as stranger, pytest.raises(Unauthenticated):
            stranger.server()
        with Client([said], api_key="other") as client:
            assert len(client.server().workers) == 2
    finally:
        up.terminate()
        up.wait(30)
    assert not any(secret in (tmp_path / "up.log").read_text() for secret in secrets["coordinator"])


@pytest.fixture
def redis_with_password() -> Iterator[str]:
    with embedded_redis() as url:
        redis.Redis.from_url(url).config_set("requirepass", REDIS_PASSWORD)
        yield url.replace("unix://", f"unix://:{REDIS_PASSWORD}@")


def _ready(log: str) -> str:
    """The coordinator's address, once all is there."""
    found = re.search(r"ready\s+gRPC at (\S+)", log)
    return found[1] if found else ""


def _children(pid: int) -> list[str]:
    return (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()


def test_up_makes_a_fleet_key_up(tmp_path: Path) -> None:
    first, second = (Stack(LaunchPlan(), "redis://x", tmp_path).plan.fleet_key for _ in range(2))
    assert first != second
    assert len(first) >= 32
