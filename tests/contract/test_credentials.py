"""Keys and certificates are exchanged in their files while the services run, over real sockets.

Streams go on, what is new is taken, what is gone is refused; a file that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from coordinator.api.service import CoordinatorService
from outrider.base.aio import background
from outrider.base.aio import until as soon
from outrider.client.aio import AsyncClient
from outrider.engine.loading.loader import LoadedModel, load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.errors import Overloaded, PeerLost, Unauthenticated
from outrider.protocol.fleet import Role
from outrider.protocol.sampling_params import SamplingParams
from outrider.security import credentials
from outrider.security.api_keys import ApiKeys, bearer
from outrider.security.channels import Channels
from outrider.security.credentials import Credentials
from outrider.security.tls import Tls
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import drafter_pb2_grpc as drafter_rpc
from outrider.v1 import verifier_pb2_grpc as verifier_rpc
from tests.certificates import Authority, Certificate
from tests.cluster import ask, in_process
from tests.conftest import Models
from tests.contract.conftest import drafter_serving, verifier_serving

pytestmark = pytest.mark.timeout(120)

NO_REDIS = "redis://127.0.0.1:1"
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = "ab ab ab ab"
TLS = "tls_cert, tls_key, tls_ca"
READ = "credentials reloaded"
LOST = "verifier lost"
NOT_USED = "credentials not reloaded, previous values stay in force"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "LOOK_S", 0.1)


@asynccontextmanager
async def serving(loaded: LoadedModel, folder: Path, **shared: Any) -> AsyncIterator[tuple[str, CoordinatorService]]:
    """A coordinator with a verifier and a drafter that share some settings; the address, and the coordinator."""
    settings = CoordinatorSettings(http_port=0, api_keys=f"@{folder / 'api-keys'}", heartbeat_ms=200, **shared)
    service = CoordinatorService(settings, NO_REDIS)
    async with (
        in_process(service, settings) as address,
        verifier_serving(loaded, folder, coordinators=address, **shared),
        drafter_serving(kind="ngram", coordinators=address, **shared),
    ):
        assert await soon(lambda: service.ready() and len(service.sessions.worker_pool.connections()) == 2, 20)
        yield address, service


def events(logs: list[Any], event: str, setting: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == event and entry["setting"] == setting]


async def read_again(logs: list[Any], setting: str, services: int = 1, event: str = READ) -> None:
    before = len(events(logs, event, setting))
    assert await soon(lambda: len(events(logs, event, setting)) >= before + services, 10), logs


async def opens(address: str, key: str, tls: Tls | None = None) -> bool:
    """Whether a new client with this key has its answer."""
    async with AsyncClient([address], api_key=key, tls=tls) as client:
        try:
            return len((await client.complete(PROMPT, params=SHORT)).token_ids) == SHORT.max_tokens
        except Unauthenticated:
            return False


class Reader:
    """A stream of the slow verifier that is read all the time, over the one connection that it began on."""

    def __init__(self, address: str, access: Channels) -> None:
        self._address = address
        self._access = access
        self._tokens = 0
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._access.aio_channel(self._address) as channel:
            request = ask(PROMPT, temperature=0.0, max_tokens=1500, ignore_eos=True, gamma=0)
            async for reply in rpc.OutriderStub(channel).Generate(request, timeout=60):
                if reply.WhichOneof("message") == "chunk":
                    assert reply.chunk.position == self._tokens
                    self._tokens += len(reply.chunk.token_ids)

    async def goes_on(self, tokens: int = 10) -> None:
        wanted = self._tokens + tokens
        await soon(lambda: self._tokens >= wanted or self._reading.done(), 20)
        assert not self._reading.done(), self._reading.exception()
        assert self._tokens >= wanted

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@asynccontextmanager
async def reading(address: str, key: str, tls: Tls | None = None) -> AsyncIterator[Reader]:
    reader = Reader(address, Channels(tls, key))
    try:
        await reader.goes_on()
        yield reader
    finally:
        await reader.leave()


@pytest.fixture(scope="module")
def slow(models: Models) -> LoadedModel:
    return load_model(str(models.target), EngineOptions(device="cpu", pace="1:20,64:20"))


async def test_api_keys_are_exchanged_while_a_stream_runs(slow: LoadedModel, tmp_path: Path) -> None:
    keys = tmp_path / "api-keys"
    keys.write_text("leaving\nstaying\n")
    with capture_logs() as logs:
        async with serving(slow, tmp_path, fleet_key="fleet") as (address, service):
            url = f"http://{service.http_address}/v1/models"
            async with reading(address, "leaving") as stream:
                assert not await opens(address, "coming")
                keys.write_text("staying\ncoming max_sessions=1\n")
                await read_again(logs, "api_keys")
                assert [await opens(address, key) for key in ("leaving", "staying", "coming")] == [False, True, True]
                found = [await asyncio.to_thread(scrape, url, key) for key in ("leaving", "staying", "coming")]
                assert found == [401, 200, 200]
                await stream.goes_on()
            # Limits are those of the file, too, for a key that was there before.
            async with reading(address, "coming"):
                with pytest.raises(Overloaded):
                    await opens(address, "coming")
                keys.write_text("staying\ncoming\n")
                await read_again(logs, "api_keys")
                assert await opens(address, "coming")


@pytest.mark.parametrize("bad", ["", "# nobody\n", "f\u00fcr-alle\n", "secret-of-all with words\n", None])
async def test_a_bad_file_of_keys_changes_nothing(bad: str | None, tmp_path: Path) -> None:
    keys = tmp_path / "api-keys"
    keys.write_text("staying\n")
    given = Credentials(CoordinatorSettings(api_keys=f"@{keys}"))
    held = given.keys["api_keys"] | ApiKeys(["other"])
    with capture_logs() as logs:
        async with background(given.follow()):
            if bad is None:
                keys.unlink()
            else:
                keys.write_text(bad, encoding="utf-8")
            await read_again(logs, "api_keys", event=NOT_USED)
            await asyncio.sleep(0.5)
            assert [held.allows(bearer(key)) for key in ("staying", "other", "")] == [True, True, False]
            keys.write_text("coming\n")
            await read_again(logs, "api_keys")
            assert [held.allows(bearer(key)) for key in ("staying", "coming", "other")] == [False, True, True]
            assert given.keys["api_keys"].first == "coming"
    told = [entry for entry in logs if entry["log_level"] == "error"]
    assert len(told) == 1, "once"
    assert str(keys) in told[0]["error"] or "api_keys: key 1" in told[0]["error"]
    assert not [secret for secret in ("staying", "secret", "alle", "coming") if secret in str(logs)]


async def test_the_name_of_a_file_of_keys_is_no_key(tmp_path: Path) -> None:
    """A blank before it, as from an environment file, made it one."""
    keys = tmp_path / "api-keys"
    keys.write_text("client\n")
    settings = CoordinatorSettings(http_port=-1, api_keys=f" @{keys}", fleet_key="f")
    service = CoordinatorService(settings, NO_REDIS)
    async with in_process(service, settings) as address:
        for key, accepted in (("client", True), (f"@{keys}", False)):
            async with AsyncClient([address], api_key=key) as client:
                with nullcontext() if accepted else pytest.raises(Unauthenticated):
                    assert (await client.server()).sessions == 0


async def test_keys_are_followed_after_a_time_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the limit of a container. The file was never looked at again: a revoked key stayed valid."""
    looks: list[int] = []

    def refuse(_: threading.Thread) -> None:
        looks.append(1)
        raise RuntimeError("can't start new thread")

    keys = tmp_path / "api-keys"
    keys.write_text("staying\nrevoked\n")
    given = Credentials(CoordinatorSettings(api_keys=f"@{keys}"))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())  # without threads yet
    with capture_logs() as logs:
        async with background(given.follow()):
            with monkeypatch.context() as full:
                full.setattr(threading.Thread, "start", refuse)
                assert await soon(lambda: len(looks) > 1, 10)
            keys.write_text("staying\n")
            await read_again(logs, "api_keys")
    assert [given.keys["api_keys"].allows(bearer(key)) for key in ("staying", "revoked")] == [True, False]


async def test_the_fleet_key_is_exchanged_in_three_steps(slow: LoadedModel, tmp_path: Path) -> None:
    """All services read one file here. At the end the old key opens nothing, and the workers still work."""
    (tmp_path / "api-keys").write_text("client\n")
    fleet = tmp_path / "fleet-key"
    fleet.write_text("old\n")
    with capture_logs() as logs:
        async with serving(slow, tmp_path, fleet_key=f"@{fleet}") as (address, service):
            links = service.sessions.worker_pool.connections()
            async with reading(address, "client") as stream:
                for step in ("old\nnew\n", "new\nold\n", "new\n"):
                    fleet.write_text(step)
                    await read_again(logs, "fleet_key", services=3)
                    await stream.goes_on()
                assert await opens(address, "client")
                for link in links:
                    assert await soon(lambda link=link: time.monotonic() - link.reported_at < 1, 5)  # type: ignore[misc]
                    for key, opened in (("old", False), ("new", True)):
                        assert await probed(link.info.address, link.info.role, key) is opened
                await stream.goes_on(75)  # for longer than the coordinator takes to look at old channels
            assert service.sessions.worker_pool.connections() == links, "nobody had to register anew"
    assert not [entry for entry in logs if entry["event"] in ("worker rejected", LOST)], "no stream was broken off"


async def probed(address: str, role: Role, key: str) -> bool:
    async with Channels(key=key).aio_channel(address) as channel:
        stub: Any = verifier_rpc.VerifierStub(channel) if role is Role.VERIFIER else drafter_rpc.DrafterStub(channel)
        code = await stub.Probe(common.ProbeRequest(), timeout=10).code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
        return bool(code is grpc.StatusCode.OK)


async def test_a_worker_shows_the_key_that_its_file_has_now(tmp_path: Path) -> None:
    key = tmp_path / "fleet-key"
    key.write_text("wrong\n")
    settings = CoordinatorSettings(http_port=-1, fleet_key="right")
    service = CoordinatorService(settings, NO_REDIS)
    with capture_logs() as logs:
        async with (
            in_process(service, settings) as address,
            drafter_serving(kind="ngram", coordinators=address, fleet_key=f"@{key}"),
        ):
            assert await soon(lambda: any(entry["event"] == "not registered" for entry in logs), 10)
            key.write_text("right\n")
            assert await soon(lambda: len(service.sessions.worker_pool.connections()) == 1, 10)


async def put(certificate: Certificate, authority: bytes, folder: Path) -> None:
    """Certificate and key are replaced one after the other, as people do it; one look falls between."""
    (folder / "tls.pem").write_bytes(certificate.cert.read_bytes())
    await asyncio.sleep(0.9 * credentials.LOOK_S)
    (folder / "tls.key").write_bytes(certificate.key.read_bytes())
    (folder / "ca.pem").write_bytes(authority)


def shown(certificate: Certificate, trusted: Authority) -> Tls:
    given = Tls.load(cert=str(certificate.cert), key=str(certificate.key), ca=str(trusted.path))
    assert given is not None
    return given


def scrape(url: str, key: str, trusted: Path | None = None, mine: Certificate | None = None) -> int:
    """The status of an HTTP request on a connection of its own."""
    context = None if trusted is None else ssl.create_default_context(cafile=str(trusted))
    if context is not None and mine is not None:
        context.load_cert_chain(mine.cert, mine.key)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("mutual", [False, True])
async def test_certificates_and_authority_are_exchanged(slow: LoadedModel, tmp_path: Path, mutual: bool) -> None:
    """Old, then old certificate with both authorities, new certificate with both, new: a fleet of three throughout."""
    (tmp_path / "api-keys").write_text("client\n")
    old, new = Authority.make(tmp_path / "old", "old"), Authority.make(tmp_path / "new", "new")
    before, after = old.issue("before"), new.issue("after")
    both = old.path.read_bytes() + new.path.read_bytes()
    await put(before, old.path.read_bytes(), tmp_path)
    files = {"tls_cert": str(tmp_path / "tls.pem"), "tls_key": str(tmp_path / "tls.key")}
    files["tls_ca"] = str(tmp_path / "ca.pem")
    with capture_logs() as logs:
        async with serving(slow, tmp_path, fleet_key="f", tls_client_auth=mutual, **files) as (address, service):
            url = f"https://{service.http_address}/v1/models"
            async with reading(address, "client", shown(before, old)) as stream:
                for certificate, trusted in ((before, both), (after, both), (after, new.path.read_bytes())):
                    await put(certificate, trusted, tmp_path)
                    await read_again(logs, TLS, services=3)
                    await stream.goes_on()
                assert await opens(address, "client", shown(after, new))
                assert await asyncio.to_thread(scrape, url, "client", new.path, after) == 200
                with pytest.raises(PeerLost):
                    await opens(address, "client", shown(before, old))
                with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
                    await asyncio.to_thread(scrape, url, "client", old.path, before)
                await stream.goes_on()
                # The coordinator calls over channels that trust the new authority and show the new certificate.
                assert await soon(lambda: all(link.usable() for link in service.sessions.worker_pool.connections()), 10)
    assert not [entry for entry in logs if entry["event"] == LOST], "no stream was broken off"
    assert not [entry for entry in logs if entry["log_level"] == "error"], "a pair half replaced is waited for"


async def test_an_authority_whose_file_is_emptied_stays_the_only_one(slow: LoadedModel, tmp_path: Path) -> None:
    """With no authority at all, the services would trust each public one, and not each other."""
    authority = Authority.make(tmp_path / "authority")
    mine = authority.issue("mine")
    (tmp_path / "api-keys").write_text("client\n")
    await put(mine, authority.path.read_bytes(), tmp_path)
    files = {"tls_cert": str(tmp_path / "tls.pem"), "tls_key": str(tmp_path / "tls.key")}
    files["tls_ca"] = str(tmp_path / "ca.pem")
    with capture_logs() as logs:
        async with serving(slow, tmp_path, fleet_key="f", **files) as (address, service):
            (tmp_path / "ca.pem").write_text("")
            await read_again(logs, TLS, services=3, event=NOT_USED)
            assert await opens(address, "client", Tls.load(ca=str(authority.path)))
            assert service.credentials.tls is not None
            assert service.credentials.tls.ca == authority.path.read_bytes()
            assert all(link.usable() for link in service.sessions.worker_pool.connections())
    told = [entry["error"] for entry in logs if entry["event"] == NOT_USED]
    assert told == [told[0]] * 3, "once for each service"
    assert f"tls_ca {files['tls_ca']} holds no certificate" in told[0]


async def test_services_that_share_a_certificate_go_by_its_name(slow: LoadedModel, tmp_path: Path) -> None:
    """They call each other at 127.0.0.1, which the certificate does not name; clients may do the same."""
    authority = Authority.make(tmp_path)
    mine = authority.issue("shared", hosts=["outrider.internal"])
    (tmp_path / "api-keys").write_text("client\n")
    files = {"tls_cert": str(mine.cert), "tls_key": str(mine.key), "tls_ca": str(authority.path)}
    async with serving(slow, tmp_path, fleet_key="fleet", tls_name="outrider.internal", **files) as (address, _):
        assert await opens(address, "client", Tls.load(ca=str(authority.path), name="outrider.internal"))
        async with AsyncClient([address], api_key="client", tls=Tls.load(ca=str(authority.path))) as stranger:
            with pytest.raises(PeerLost):
                await stranger.server()
