"""Who registers is who he said first, with the key of his role, and takes nobody's place."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until as soon
from outrider.protocol.errors import Conflict, InvalidRequest, OutriderError, StartupError, Unauthenticated, Unavailable
from outrider.protocol.fleet import Role
from outrider.security.channels import Channels
from outrider.security.credentials import Credentials
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import drafter_pb2_grpc as drafter_rpc
from tests.cluster import environment, failure, free_port, in_process

pytestmark = pytest.mark.timeout(60)

FLEET_KEY, DRAFTER_KEY, API_KEY = "the-fleets", "the-drafters", "a-clients"
NO_REDIS = "redis://127.0.0.1:1"
HEARTBEAT_MS = 200


@dataclass(frozen=True, slots=True)
class Desk:
    address: str
    service: CoordinatorService

    def worker(self, worker_id: str) -> Any:
        links = self.service.sessions.worker_pool.connections()
        return next((link.info for link in links if link.info.worker_id == worker_id), None)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def desk() -> AsyncIterator[Desk]:
    settings = CoordinatorSettings(
        http_port=-1,
        fleet_key=FLEET_KEY,
        drafter_key=DRAFTER_KEY,
        api_keys=API_KEY,
        heartbeat_ms=HEARTBEAT_MS,
        open_timeout_s=2.0,
    )
    service = CoordinatorService(settings, NO_REDIS)
    async with in_process(service, settings) as address:
        yield Desk(address, service)


def saying(worker_id: str, role: pb.Role.ValueType = pb.ROLE_DRAFTER, **more: Any) -> pb.RegisterRequest:
    given = {"worker_id": worker_id, "role": role, "address": "127.0.0.1:1", "kind": "test", "capacity": 4}
    return pb.RegisterRequest(worker=pb.Worker(model=common.ModelInfo(name="m"), **(given | more)))


@asynccontextmanager
async def registering(desk: Desk, first: pb.RegisterRequest, key: str = DRAFTER_KEY) -> AsyncIterator[Any]:
    async with Channels(key=key).aio_channel(desk.address) as channel:
        call: Any = rpc.RegistryStub(channel).Register(timeout=30)  # type: ignore[call-arg]
        await call.write(first)
        try:
            yield call
        finally:
            call.cancel()


async def refusal(desk: Desk, first: pb.RegisterRequest, key: str = DRAFTER_KEY) -> OutriderError:
    async with registering(desk, first, key) as call:
        return (await failure(call))[1]


async def test_a_stream_is_about_the_worker_it_began_with(desk: Desk) -> None:
    other = saying("other", address="127.0.0.1:2")
    for lie in (
        saying("other", address="127.0.0.1:2", draining=True),
        saying("liar", pb.ROLE_VERIFIER),
        saying("liar", address="127.0.0.1:9"),
        saying("liar", kind="suffix"),
        pb.RegisterRequest(
            worker=pb.Worker(worker_id="liar", role=pb.ROLE_DRAFTER, address="127.0.0.1:1", kind="test", capacity=4)
        ),
    ):
        async with registering(desk, other) as honest, registering(desk, saying("liar")) as liar:
            assert (await honest.read()).accepted
            assert (await liar.read()).accepted
            await liar.write(lie)
            assert isinstance((await failure(liar))[1], InvalidRequest), lie
            assert desk.worker("other") is not None
            assert not desk.worker("other").draining
            await honest.write(saying("other", address="127.0.0.1:2", draining=True, capacity=9))
            assert await soon(lambda: desk.worker("other").draining, 5), "of itself it may"
        assert await soon(lambda: desk.worker("other") is None and desk.worker("liar") is None, 5)


@pytest.mark.parametrize(("field", "given", "limit"), [("kind", "", "kind"), ("capacity", 0, "at least 1 session")])
async def test_a_worker_of_no_kind_or_without_room_is_refused(desk: Desk, field: str, given: Any, limit: str) -> None:
    """Sessions choose drafters by kind, and nothing would ever run where no session fits."""
    error = await refusal(desk, saying("d", **{field: given}))
    assert (type(error), error.field) == (InvalidRequest, f"worker.{field}")
    assert limit in error.limit
    async with registering(desk, saying("d")) as call:
        assert (await call.read()).accepted
        await call.write(saying("d", **{field: given}))
        assert (await failure(call))[1].field == f"worker.{field}", "in a report likewise"


@pytest.mark.parametrize(("field", "given"), [("temperature", math.nan), ("top_p", 1.5), ("repetition_penalty", -1.0)])
async def test_sampling_that_no_request_can_have_is_no_default(desk: Desk, field: str, given: float) -> None:
    """Requests over HTTP get it, and would be refused for what they leave out."""
    first = saying("v", pb.ROLE_VERIFIER)
    setattr(first.worker.model.sampling, field, given)
    error = await refusal(desk, first, FLEET_KEY)
    assert (type(error), error.field, error.value) == (InvalidRequest, f"params.{field}", str(given))


@pytest.mark.parametrize("given", ["a-host", "127.0.0.1:99999", "unix:///etc/passwd"])
async def test_an_address_that_no_other_coordinator_would_read_is_refused(desk: Desk, given: str) -> None:
    error = await refusal(desk, saying("d", address=given))
    assert (type(error), error.value) == (InvalidRequest, given)
    assert "host:port" in error.message


@pytest.mark.parametrize("field", ["worker_id", "kind", "model.name"])
@pytest.mark.parametrize("said", ["a\x1b]0;owned\x07", "a\n2026-11-30 [error] all is lost", "a\u202eb"])
async def test_what_commands_a_terminal_names_no_worker(desk: Desk, field: str, said: str) -> None:
    """`outrider doctor` shows operators what workers say of themselves, and an answer names its drafter to users."""
    first = saying("w")
    owner, _, name = field.rpartition(".")
    setattr(getattr(first.worker, owner) if owner else first.worker, name, said)
    error = await refusal(desk, first)
    assert (type(error), error.field, error.limit) == (InvalidRequest, f"worker.{field}", "printable")
    assert error.message.isprintable()


async def test_doctor_shows_the_kind_of_a_worker_as_it_is(desk: Desk) -> None:
    """Rich would take it for its own marks, such as a link."""
    async with registering(desk, saying("d", kind="[link=http://evil]x[/link]")) as call:
        assert (await call.read()).accepted
        command = [sys.executable, "-c", "from outrider.cli import main; main()", "doctor"]
        doctor = await asyncio.create_subprocess_exec(
            *command, "--endpoint", desk.address, "--api-key", API_KEY, stdout=subprocess.PIPE, env=environment()
        )
        assert doctor.stdout is not None
        async with asyncio.timeout(50):
            while line := await doctor.stdout.readline():
                await call.write(saying("d", kind="[link=http://evil]x[/link]"))
                if b"m at 127.0.0.1:1" in line or b"[link" in line:
                    break
            doctor.kill()
            await doctor.wait()
    assert b"[link" in line


async def test_a_key_registers_workers_of_its_role_only(desk: Desk) -> None:
    assert isinstance(await refusal(desk, saying("v", pb.ROLE_VERIFIER), DRAFTER_KEY), Unauthenticated)
    assert isinstance(await refusal(desk, saying("d", pb.ROLE_DRAFTER), FLEET_KEY), Unauthenticated)
    assert isinstance(await refusal(desk, saying("d", pb.ROLE_DRAFTER), API_KEY), Unauthenticated)
    assert desk.service.sessions.worker_pool.connections() == []


async def test_a_drafters_key_opens_nothing_else(desk: Desk) -> None:
    async with Channels(key=DRAFTER_KEY).aio_channel(desk.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.OutriderStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest()]), timeout=5):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


class Nosy(drafter_rpc.DrafterServicer):
    """A drafter that looks at what it is shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    async def Probe(
        self, request: common.ProbeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common.ProbeReply:
        self.shown.append(str(dict(context.invocation_metadata() or ()).get("authorization")))
        return common.ProbeReply()


async def test_drafters_are_shown_the_drafters_key(desk: Desk) -> None:
    nosy = Nosy()
    server = grpc.aio.server()
    drafter_rpc.add_DrafterServicer_to_server(nosy, server)  # type: ignore[no-untyped-call,unused-ignore]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with registering(desk, saying("nosy", address=f"127.0.0.1:{port}")):
            assert await soon(lambda: bool(nosy.shown), 5)
    finally:
        await server.stop(None)
    assert set(nosy.shown) == {f"Bearer {DRAFTER_KEY}"}


async def test_nobody_takes_the_id_or_the_place_of_a_worker_that_is_there(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.workers.registrations.SILENT_AFTER_HEARTBEATS", 100)  # a busy machine is late
    mine = saying("mine", address="127.0.0.1:7")
    async with registering(desk, mine) as call:
        assert (await call.read()).accepted
        for thief in (saying("mine", address="127.0.0.1:8"), saying("thief", address="127.0.0.1:7")):
            await call.write(mine)  # it lives
            assert isinstance(await refusal(desk, thief), Conflict)
            assert desk.worker("mine").address == "127.0.0.1:7"
        # The same worker over a new stream, as after its connection broke.
        async with registering(desk, mine) as again:
            assert (await again.read()).accepted
    assert await soon(lambda: desk.worker("mine") is None, 5)
    async with registering(desk, saying("restarted", address="127.0.0.1:7")) as call:
        assert (await call.read()).accepted


async def test_a_removed_worker_hears_of_it_with_its_next_report(desk: Desk) -> None:
    """Else it would report on, and nobody would use it."""
    mine = saying("removed")
    async with registering(desk, mine) as call:
        assert (await call.read()).accepted
        await desk.service.sessions.worker_pool.workers.drop("removed")
        await call.write(mine)
        assert isinstance((await failure(call))[1], Unavailable)
    async with registering(desk, mine) as call:
        assert (await call.read()).accepted


async def test_the_place_of_one_that_fell_silent_can_be_taken(desk: Desk) -> None:
    """Its machine was switched off, and the connection does not know."""
    async with registering(desk, saying("silent", address="127.0.0.1:5")) as call:
        assert (await call.read()).accepted

        async def taken() -> bool:
            async with registering(desk, saying("restarted", address="127.0.0.1:5")) as restarted:
                reply = await restarted.read()
                return reply is not grpc.aio.EOF and bool(reply.accepted)

        for _ in range(50):
            try:
                if await taken():
                    break
            except grpc.aio.AioRpcError:
                assert desk.worker("silent") is not None
                await asyncio.sleep(HEARTBEAT_MS / 2000)
        else:
            pytest.fail("its place was never free")


async def test_a_coordinator_that_leaves_sends_its_workers_to_another() -> None:
    settings = CoordinatorSettings(http_port=-1)
    service = CoordinatorService(settings, NO_REDIS)
    async with in_process(service, settings) as address:
        leaving = Desk(address, service)
        async with registering(leaving, saying("early"), "") as call:
            assert (await call.read()).accepted
            stopping = asyncio.create_task(service.stop())
            error = (await failure(call))[1]
            assert isinstance(error, Unavailable)
            assert "shutting down" in error.message
            assert isinstance(await refusal(leaving, saying("late"), ""), Unavailable)
            await stopping


async def test_one_key_for_all_works_and_is_told() -> None:
    """As in the release before drafters had a key of their own."""
    settings = CoordinatorSettings(http_port=-1, fleet_key=FLEET_KEY)
    with capture_logs() as logs:
        service = CoordinatorService(settings, NO_REDIS)
    assert [entry["log_level"] for entry in logs if "no drafter_key" in entry["event"]] == ["warning"]
    async with in_process(service, settings) as address:
        old = Desk(address, service)
        async with registering(old, saying("old", address=f"127.0.0.1:{free_port()}"), FLEET_KEY) as call:
            assert (await call.read()).accepted
    assert service.fleet.access(Role.DRAFTER).key == FLEET_KEY
    assert Channels.of(Credentials(DrafterSettings(fleet_key=FLEET_KEY))).key == FLEET_KEY
    assert Channels.of(Credentials(DrafterSettings(fleet_key=FLEET_KEY, drafter_key=DRAFTER_KEY))).key == DRAFTER_KEY


def test_a_drafters_key_alone_is_refused() -> None:
    with pytest.raises(StartupError, match="without fleet_key"):
        CoordinatorService(CoordinatorSettings(http_port=-1, drafter_key=DRAFTER_KEY), NO_REDIS)
