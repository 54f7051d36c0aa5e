"""Priority classes and deadlines as clients see them: one seat, two API keys, HTTP and gRPC."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2 as httpx
import pytest
import pytest_asyncio

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until as soon
from outrider.engine.mock import MockEngine
from outrider.security.channels import Channels
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.verifier import VerifierSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import Cluster, Redis, ask, client, failure, generate, in_process, until_async
from verifier.engine_target import EngineTarget
from verifier.service import VerifierService

FLEET_KEY, STAFF, BATCH = "secret-of-the-fleet", "staff-s-key", "batch-s-key"
KEYS = f"staff: {STAFF} best_priority=-10,batch: {BATCH} priority=5"
PROMPT = [1, 2, 3]
LONG = 1_000_000  # tokens: minutes of the engine without a model
SHORT = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Hall:
    """A coordinator with API keys, and a verifier without a model for one session at a time."""

    coordinator: str
    http: str

    def web(self, key: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=f"http://{self.http}", headers=headers, timeout=30)

    @asynccontextmanager
    async def stub(self, key: str) -> AsyncIterator[Any]:
        async with Channels(key=key).aio_channel(self.coordinator) as channel:
            yield rpc.OutriderStub(channel)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hall(redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hall]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=100, api_keys=KEYS, fleet_key=FLEET_KEY)
    service, engine = CoordinatorService(settings, redis_server.url), MockEngine()
    async with AsyncExitStack() as exits:
        coordinator = await exits.enter_async_context(in_process(service, settings))
        chosen = VerifierSettings(coordinators=coordinator, fleet_key=FLEET_KEY, max_sessions=1, kv_tokens=2 * LONG)
        files = engine.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
        verifier = VerifierService(EngineTarget(engine), engine.vocabulary, files, chosen)
        await exits.enter_async_context(in_process(verifier, chosen))
        assert await soon(service.ready, 20)
        yield Hall(coordinator, service.http_address)


async def waiting(hall: Hall) -> dict[int, int]:
    """Return the number of waiting requests by class, as `/metrics` says."""
    async with hall.web(STAFF) as client:
        text = (await client.get("/metrics")).text
    found = re.findall(r'outrider_requests_waiting_by_priority\{.*priority="(-?\d+)"\} (\d+)', text)
    return {int(priority): int(number) for priority, number in found}


async def until_waiting(hall: Hall, expected: dict[int, int]) -> None:
    async def seen() -> bool:
        return await waiting(hall) == expected

    await until_async(seen, 10, f"waiting: {expected}")


@asynccontextmanager
async def seat_taken(hall: Hall) -> AsyncIterator[None]:
    """Hold the only seat."""
    async with hall.stub(STAFF) as staff:
        call = staff.Generate(ask(PROMPT, temperature=0.0, max_tokens=LONG, ignore_eos=True), timeout=60)
        while not (await call.read()).HasField("chunk"):
            continue
        try:
            yield
        finally:
            call.cancel()


async def test_waiting_requests_are_served_by_class_over_both_protocols(hall: Hall) -> None:
    served: list[str] = []
    long = {"max_tokens": 1000}  # the answer before it is read long before it ends
    urgent = ask(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True)
    urgent.priority = -1

    async with hall.web(BATCH) as batch, hall.web(STAFF) as late, hall.stub(STAFF) as staff:

        async def over_http(client: httpx.AsyncClient, name: str, **more: int) -> None:
            reply = await client.post("/v1/completions", json=SHORT | long | more)
            assert reply.status_code == 200, reply.text
            served.append(name)

        async def over_grpc() -> None:
            await generate(staff, urgent)
            served.append("urgent")

        # The seat is given back before the group waits for its tasks.
        async with asyncio.TaskGroup() as group, seat_taken(hall):
            group.create_task(over_http(batch, "batch"))
            await until_waiting(hall, {5: 1})
            group.create_task(over_http(late, "least", priority=9))
            await until_waiting(hall, {5: 1, 9: 1})
            group.create_task(over_grpc())
            await until_waiting(hall, {5: 1, 9: 1, -1: 1})
            assert not served
    assert served == ["urgent", "batch", "least"]


async def test_a_request_that_waits_until_its_deadline_frees_its_place(hall: Hall) -> None:
    """Too little is known yet to refuse it at once."""
    async with hall.web(BATCH) as batch:
        async with seat_taken(hall):
            for stream in (False, True):
                body, headers = SHORT | {"stream": stream}, {"X-Request-Timeout": "1"}
                reply = await batch.post("/v1/completions", json=body, headers=headers)
                error = reply.json()["error"]
                assert (reply.status_code, error["type"], error["param"]) == (504, "server_error", "timeout")
                assert "waited until its deadline" in error["message"]
                assert int(reply.headers["retry-after"]) > 0
            await until_waiting(hall, {})
        answered = await batch.post("/v1/completions", json=SHORT, headers={"X-Request-Timeout": "20"})
        assert answered.status_code == 200


async def test_what_cannot_be_answered_in_time_is_refused_at_once(hall: Hall) -> None:
    """A million tokens within twenty seconds: no round trip is that short."""
    body = SHORT | {"max_tokens": LONG}
    request = ask(PROMPT, temperature=0.0, max_tokens=LONG, ignore_eos=True)
    async with hall.web(STAFF) as client, hall.stub(STAFF) as staff:
        for _ in range(5):
            measured = await client.post("/v1/completions", json=SHORT | {"max_tokens": 100})
            assert measured.status_code == 200
        reply = await client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "20"})
        assert reply.status_code == 504
        assert re.fullmatch(
            r"the request allows 20 s and would take .* s at least, .* s of them in the queue",
            reply.json()["error"]["message"],
        )
        assert reply.headers["retry-after"] == "60"
        code, _, typed = await failure(staff.Generate(request, timeout=20))
        assert (code, typed.code, typed.field) == (grpc.StatusCode.DEADLINE_EXCEEDED, "expired", "timeout")
        assert typed.retry_after_ms == 60_000
        metrics = (await client.get("/metrics")).text
        assert re.search(r'outrider_requests_refused_by_limit_total\{limit="timeout"\} [2-9]', metrics)
        in_time = await client.post("/v1/completions", json=SHORT, headers={"X-Request-Timeout": "20"})
        assert in_time.status_code == 200


async def test_a_timeout_that_is_none_is_refused_by_name(hall: Hall) -> None:
    async with hall.web(STAFF) as client:
        for value in ("0", "-1", "nan", "soon", "1e9", ""):
            reply = await client.post("/v1/completions", json=SHORT, headers={"X-Request-Timeout": value})
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), value
            assert error["param"] == "X-Request-Timeout"


async def test_no_key_asks_for_a_better_class_than_its_own(hall: Hall) -> None:
    async with hall.web(BATCH) as batch, hall.stub(BATCH) as grpc_batch:
        for priority, status in ((4, 400), (5, 200), (101, 400), (1.5, 400)):
            reply = await batch.post("/v1/completions", json=SHORT | {"priority": priority})
            assert reply.status_code == status, priority
        chat = {"messages": [{"role": "user", "content": "t1"}], "priority": 4}
        assert (await batch.post("/v1/chat/completions", json=chat)).json()["error"]["param"] == "priority"
        assert (await batch.post("/v1/responses", json={"input": "t1", "priority": 4})).status_code == 400
        code, _, typed = await failure(
            grpc_batch.Generate(pb.GenerateRequest(prompt="t1", priority=4, params={"max_tokens": 1}), timeout=10)
        )
        assert (code, typed.field, typed.limit) == (grpc.StatusCode.INVALID_ARGUMENT, "priority", "in [5, 100]")


async def test_a_deadline_that_has_passed_is_told_by_a_fleet_of_processes(cluster: Cluster) -> None:
    """And one that holds changes nothing, without API keys and whatever the class."""
    body = {"prompt": "One and one is", "max_tokens": 8, "temperature": 0}
    async with httpx.AsyncClient(base_url=cluster.coordinators[0].web, timeout=30) as web:
        late = await web.post("/v1/completions", json=body, headers={"X-Request-Timeout": "1e-9"})
        plain = await web.post("/v1/completions", json=body)
        hurried = await web.post("/v1/completions", json=body, headers={"X-Request-Timeout": "30"})
    assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout")
    assert plain.status_code == hurried.status_code == 200
    async with client(cluster.address) as stub:
        request = ask("One and one is", max_tokens=8, temperature=0.0)
        request.priority = -100
        output = await generate(stub, request)
    assert hurried.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"] == output.text
