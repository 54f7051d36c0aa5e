"""What belongs to one API key is closed to the others."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import httpx2 as httpx
import pytest
import pytest_asyncio
import redis
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until as soon
from outrider.engine.loading.loader import LoadedModel
from outrider.security.channels import Channels
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import Output, Redis, ask, failure, follow, generate, in_process
from tests.contract.conftest import after_joining, drafter_serving, slowed, verifier_serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "What is mine is mine, and what is yours is yours. What is mine is not yours, and so on and so on. "
FLEET_KEY = "secret-of-the-fleet"
ALICE, BOB = "alice-s-key", "bob-s-key"
KEYS = f"alice: {ALICE},bob: {BOB},limited: few requests_per_minute=2,short: little tokens_per_minute=100"
KEYS += ",again: once requests_per_minute=1,turns: lone requests_per_minute=1"


@dataclass(frozen=True, slots=True)
class Hotel:
    """A coordinator with API keys, a verifier and a drafter that remembers texts."""

    service: CoordinatorService
    coordinator: str

    @asynccontextmanager
    async def guest(self, key: str) -> AsyncIterator[Any]:
        async with Channels(key=key).aio_channel(self.coordinator) as channel:
            yield rpc.OutriderStub(channel)

    def web(self, key: str) -> httpx.AsyncClient:
        base = f"http://{self.service.http_address}"
        return httpx.AsyncClient(base_url=base, headers={"Authorization": f"Bearer {key}"}, timeout=30)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hotel(
    loaded: LoadedModel, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Hotel]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=100, api_keys=KEYS, fleet_key=FLEET_KEY)
    async with AsyncExitStack() as exits:
        service = CoordinatorService(settings, redis_server.url)
        coordinator = await exits.enter_async_context(in_process(service, settings))
        reports = {"coordinators": coordinator, "fleet_key": FLEET_KEY}
        await exits.enter_async_context(verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), **reports))
        await exits.enter_async_context(drafter_serving(kind="suffix", **reports))
        assert await soon(lambda: service.ready() and len(service.sessions.worker_pool.connections()) == 2, 20)
        yield Hotel(service, coordinator)


@pytest.mark.parametrize("method", ["Resume", "Cancel"])
@pytest.mark.parametrize("state", ["going on", "finished", "in Redis"])
async def test_another_s_session_is_not_there(hotel: Hotel, loaded: LoadedModel, method: str, state: str) -> None:
    kind = {"Resume": pb.ResumeRequest, "Cancel": pb.CancelRequest}[method]
    async with AsyncExitStack() as stack:
        if state == "going on":  # until it is cancelled, also on a busy machine
            stack.enter_context(slowed(loaded, 0.005))
        alice, bob = [await stack.enter_async_context(hotel.guest(who)) for who in (ALICE, BOB)]
        length = 1500 if state == "going on" else 4
        call = alice.Generate(ask(PROMPT, temperature=0.0, max_tokens=length, ignore_eos=True, gamma=0), timeout=30)
        session_id = (await call.read()).started.session_id
        if state != "going on":
            while await call.read() is not grpc.aio.EOF:
                continue
        if state == "in Redis":
            assert await hotel.service.sessions.write_behind.flush(5)
            hotel.service.sessions.ended.recent.clear()
        code, error, typed = await failure(getattr(bob, method)(kind(session_id=session_id), timeout=10))
        nobody = await failure(getattr(bob, method)(kind(session_id="0" * 24), timeout=10))
        assert code is nobody[0] is grpc.StatusCode.NOT_FOUND
        assert error.message.replace(session_id, "ID") == nobody[1].message.replace("0" * 24, "ID")
        assert (typed.code, typed.field, typed.limit) == (nobody[2].code, nobody[2].field, nobody[2].limit)
        if state == "going on":
            assert (await call.read()).HasField("chunk"), "and it goes on"
            assert (await alice.Cancel(pb.CancelRequest(session_id=session_id), timeout=5)).cancelled
        else:
            again = await follow(alice.Resume(pb.ResumeRequest(session_id=session_id), timeout=10), Output())
            assert len(again.token_ids) == 4


async def test_idempotency_keys_are_each_tenant_s_own(hotel: Hotel) -> None:
    key = secrets.token_hex(4)
    async with hotel.guest(ALICE) as alice, hotel.guest(BOB) as bob:
        first = await generate(alice, ask(PROMPT, max_tokens=4, key=key))
        again = await generate(alice, ask(PROMPT, max_tokens=4, key=key))
        other = await generate(bob, ask("Something else.", max_tokens=5, key=key))
    assert first.session_id == again.session_id != other.session_id


async def test_what_is_cached_tells_nothing_of_others(hotel: Hotel, loaded: LoadedModel) -> None:
    """Neither the count of cached tokens nor what a drafter guesses."""
    prompt = f"{secrets.token_hex(8)} {PROMPT * 2}"
    request = ask(prompt, temperature=0.0, max_tokens=100, ignore_eos=True, gamma=4, patience_us=100_000)
    async with hotel.guest(ALICE) as alice, hotel.guest(BOB) as bob:
        with after_joining(loaded, hotel.service):
            await generate(alice, request)
            again = await generate(alice, request)
            other = await generate(bob, request)
    assert again.stats.cached_tokens > 0
    assert other.stats.cached_tokens == 0
    assert again.token_ids == other.token_ids
    assert again.stats.accepted_tokens > other.stats.accepted_tokens + 20, "the suffix drafter knows alice's own text"


async def test_over_http_it_is_the_same(hotel: Hotel) -> None:
    body = {"prompt": f"{secrets.token_hex(8)} {PROMPT * 2}", "max_tokens": 4, "temperature": 0}
    async with hotel.web(ALICE) as alice, hotel.web(BOB) as bob:
        await alice.post("/v1/completions", json=body)
        cached = [
            (await web.post("/v1/completions", json=body)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for web in (bob, alice)
        ]
    assert cached[0] == 0
    assert cached[1] > 0


async def test_a_repeated_request_whose_answer_is_forgotten_counts_for_its_key(
    hotel: Hotel, redis_server: Redis
) -> None:
    """It generates again. Keys of yesterday would else start any number of sessions at once."""
    request = ask(PROMPT, max_tokens=2)
    request.idempotency_key = secrets.token_hex(4)
    sessions = hotel.service.sessions
    async with hotel.guest("once") as once:
        output = await generate(once, request)
        assert (await generate(once, request)).token_ids == output.token_ids, "told again"
        assert await sessions.write_behind.flush(5)
        sessions.ended.recent.clear()
        with redis.Redis.from_url(redis_server.url) as store:
            store.flushall()
        code, _, typed = await failure(once.Generate(request, timeout=10))
        assert (code, typed.field) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "key.requests_per_minute")


async def test_an_idempotency_key_is_free_again_when_redis_has_forgotten_it(
    hotel: Hotel, loaded: LoadedModel, redis_server: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named another request an hour ago. Another coordinator would take it, too. A running session keeps its key."""
    monkeypatch.setattr(hotel.service.sessions._keys, "_ttl_s", 0.1)
    request, other = [ask(PROMPT, max_tokens=tokens, ignore_eos=True) for tokens in (30, 3)]
    request.idempotency_key = other.idempotency_key = "the report of the day"
    async with hotel.guest(ALICE) as alice:
        with redis.Redis.from_url(redis_server.url) as store, slowed(loaded, 0.1):
            running = asyncio.create_task(generate(alice, request))
            await asyncio.sleep(0.5)
            store.flushall()
            assert (await failure(alice.Generate(other, timeout=10)))[0] is grpc.StatusCode.FAILED_PRECONDITION
            again = await generate(alice, request)
            first = await running
            store.flushall()
        second = await generate(alice, other)
    assert again.session_id == first.session_id != second.session_id
    assert len(second.token_ids) == 3


async def test_a_key_has_its_quotas(hotel: Hotel) -> None:
    """Of requests and of tokens, over both protocols, and others do not notice."""
    async with hotel.guest("few") as few, hotel.web("few") as web:
        for _ in range(2):
            await generate(few, ask(PROMPT, max_tokens=2))
        code, _, typed = await failure(few.Generate(ask(PROMPT, max_tokens=2), timeout=10))
        assert (code, typed.field) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "key.requests_per_minute")
        assert 0 < typed.retry_after_ms <= 30_000
        reply = await web.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert reply.status_code == 429
        assert 0 < int(reply.headers["retry-after"]) <= 30
    async with hotel.guest("little") as little:
        await generate(little, ask("x", max_tokens=120, ignore_eos=True))
        code, _, typed = await failure(little.Generate(ask("x", max_tokens=2), timeout=10))
        assert (code, typed.field) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "key.tokens_per_minute")
    async with hotel.guest(BOB) as bob:
        await generate(bob, ask(PROMPT, max_tokens=2))


async def test_every_request_leaves_a_line_that_says_whose_it_was(hotel: Hotel) -> None:
    with capture_logs() as lines:
        async with hotel.guest(ALICE) as alice, hotel.web(BOB) as web:
            output = await generate(alice, ask(PROMPT, max_tokens=5, ignore_eos=True))
            await web.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}, headers={"x-request-id": "b-1"})
        assert await soon(lambda: sum(line["event"] == "request ended" for line in lines) == 2, 5)
    first, second = [line for line in lines if line["event"] == "request ended"]
    assert (first["tenant"], first["session_id"], first["reason"]) == ("alice", output.session_id, "length")
    assert (first["output_tokens"], first["prompt_tokens"]) == (5, output.prompt_tokens)
    assert len(first["request_id"]) == 32
    assert (second["tenant"], second["request_id"]) == ("bob", "b-1")
    assert not any("mine is mine" in str(line) for line in lines), "prompts are nobody's business"


async def test_every_call_leaves_a_line_also_when_a_finished_session_is_only_told_again(hotel: Hotel) -> None:
    request = ask(PROMPT, max_tokens=5, ignore_eos=True, seed=3)
    request.idempotency_key = secrets.token_hex(4)
    named = (("x-request-id", "told-again"),)
    async with hotel.guest(ALICE) as alice, hotel.guest(BOB) as bob:
        output = await generate(alice, request)
        with capture_logs([merge_contextvars]) as lines:
            again = await follow(alice.Generate(request, timeout=10, metadata=named), Output())
            resumed = pb.ResumeRequest(session_id=output.session_id)
            await follow(alice.Resume(resumed, timeout=10, metadata=named), Output())
            await alice.Cancel(pb.CancelRequest(session_id=output.session_id), metadata=named)
            assert (await failure(bob.Resume(resumed, timeout=10, metadata=named)))[0] is grpc.StatusCode.NOT_FOUND
            assert await soon(lambda: sum(line["event"] == "grpc" for line in lines) == 4, 5)
    assert again.token_ids == output.token_ids
    told = [line for line in lines if line["event"] == "grpc"]
    assert [(line["method"], line["status"], line["tenant"]) for line in told] == [
        ("Generate", "OK", "alice"),
        ("Resume", "OK", "alice"),
        ("Cancel", "OK", "alice"),
        ("Resume", "NOT_FOUND", "bob"),
    ]
    for line in told:
        assert (line["session_id"], line["request_id"], line["log_level"]) == (output.session_id, "told-again", "info")
        assert line["ms"] >= 0


async def test_a_call_that_is_ended_behind_its_last_message_is_ok(hotel: Hotel) -> None:
    """As Outrider's own clients end it, which do not wait for the status; a third of their calls were `CANCELLED`."""

    async def no_metadata(_: Any) -> None:
        pass

    context: Any = SimpleNamespace(
        invocation_metadata=tuple,
        set_trailing_metadata=list,
        trailing_metadata=tuple,
        send_initial_metadata=no_metadata,
        time_remaining=lambda: None,
    )
    with capture_logs() as lines:
        for last, code in (("chunk", None), ("complete", None), ("complete", grpc.StatusCode.DEADLINE_EXCEEDED)):
            context.code = lambda code=code: code
            replies: Any = hotel.service.Generate(ask(PROMPT, max_tokens=5, ignore_eos=True, seed=9), context)
            while not (await anext(replies)).HasField(last):
                pass
            await replies.aclose()
    assert [line["status"] for line in lines if line["event"] == "grpc"] == ["CANCELLED", "OK", "DEADLINE_EXCEEDED"]


async def test_a_key_may_be_sent_as_anthropic_s_clients_send_it(hotel: Hotel) -> None:
    """On any route. Refusals of messages have the shape that these clients read."""
    body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
    async with httpx.AsyncClient(base_url=f"http://{hotel.service.http_address}", timeout=30) as web:
        for headers in ({"x-api-key": "wrong"}, {"x-api-key": "lone", "authorization": "Bearer wrong"}, {}):
            refused = await web.post("/v1/messages", json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert refused.json()["type"] == "error"
        assert (await web.get("/v1/models", headers={"x-api-key": "lone"})).status_code == 200
        answered = await web.post("/v1/messages", json=body, headers={"x-api-key": "lone"})
        assert answered.status_code == 200, answered.text
        refused = await web.post("/v1/messages", json=body, headers={"x-api-key": "lone"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) > 0
        count = {"messages": body["messages"]}
        counted = await web.post("/v1/messages/count_tokens", json=count, headers={"x-api-key": "lone"})
        assert counted.status_code == 200, "it generates nothing"
