"""Limits per model with two targets: a busy one leaves places to the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until as soon
from outrider.engine.loading.loader import LoadedModel, load_model
from outrider.engine.loading.options import EngineOptions
from outrider.security.channels import Channels
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import Redis, ask, failure, generate, in_process
from tests.conftest import Models
from tests.contract.conftest import HEARTBEAT_MS, verifier_serving

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

KEYS = "alice: one,bob: two"
LIMITS = {
    "sessions": "words=sessions:2,target=context:64 output:16",
    "waiting": "words=waiting:1",
    "keys": "words=key_sessions:1",
}
LONG: dict[str, Any] = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Limited:
    """A coordinator with limits."""

    address: str
    service: CoordinatorService

    @asynccontextmanager
    async def stub(self, key: str = "one") -> AsyncIterator[Any]:
        async with Channels(key=key).aio_channel(self.address) as channel:
            yield rpc.OutriderStub(channel)

    def api(self, key: str = "one") -> AsyncOpenAI:
        base = f"http://{self.service.http_address}/v1"
        return AsyncOpenAI(base_url=base, api_key=key, max_retries=0, timeout=30)

    @asynccontextmanager
    async def busy(self, *keys: str) -> AsyncIterator[None]:
        """Keep a session per key on the model `words`, whose verifier runs one of them."""
        async with AsyncExitStack() as stack:
            calls = []
            for key in keys:
                stub = await stack.enter_async_context(self.stub(key))
                calls.append(stub.Generate(ask("x", model="words", **LONG), timeout=30))
                await calls[-1].read()
            await calls[0].read()
            yield
            for call in calls:
                call.cancel()
        assert await soon(lambda: not self.service.sessions.live, 10)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def limited(
    loaded: LoadedModel, models: Models, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Limited]]:
    """Coordinators with different limits, which share two verifiers."""
    # So slow that its long answers outlast what is asked beside them: 1500 tokens take 7 s.
    words = load_model(str(models.other_vocabulary), EngineOptions(device="cpu", pace="1:5"))
    async with AsyncExitStack() as stack:
        made = {}
        for name, limits in LIMITS.items():
            settings = CoordinatorSettings(
                http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5, api_keys=KEYS, model_limits=limits,
                fleet_key="a-secret", default_model="target", default_chat_tokens=7 if name == "keys" else 1024,
            )  # fmt: skip
            service = CoordinatorService(settings, redis_server.url)
            address = await stack.enter_async_context(in_process(service, settings))
            made[name] = Limited(address, service)
        everywhere = {"coordinators": ",".join(each.address for each in made.values()), "fleet_key": "a-secret"}
        for model, more in ((loaded, {}), (words, {"served_model_name": "words", "max_sessions": 1})):
            folder = tmp_path_factory.mktemp("tokenizer")
            await stack.enter_async_context(verifier_serving(model, folder, **everywhere, **more))
        for each in made.values():
            pool = each.service.sessions.worker_pool
            assert await soon(lambda pool=pool: len(pool.connections()) == 2, 20)
        yield made


async def refused(at: Limited, field: str, key: str = "one") -> None:
    """Ask for the busy model over both protocols, and for the other one."""
    async with at.stub(key) as stub, at.api(key) as api:
        code, _, error = await failure(stub.Generate(ask("x", model="words", max_tokens=2), timeout=10))
        assert (code, error.field, error.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, field, 1000)
        with pytest.raises(openai.RateLimitError) as caught:
            await api.chat.completions.create(model="words", messages=[{"role": "user", "content": "x"}], max_tokens=2)
        told = caught.value
        assert told.response.headers["retry-after"] == "1"
        assert (told.type, told.code, told.param) == ("rate_limit_error", "rate_limit_exceeded", field)
        assert "model words" in told.message
        assert len((await generate(stub, ask("x", model="target", max_tokens=2, ignore_eos=True))).token_ids) == 2
        assert (await api.completions.create(model="target", prompt="x", max_tokens=2)).model == "target"
        metrics = at.service.sessions.metrics.registry.get_sample_value
        assert (metrics("outrider_requests_refused_by_limit_total", {"limit": field}) or 0) >= 2


async def test_a_busy_model_leaves_places_to_the_other(limited: dict[str, Limited]) -> None:
    at = limited["sessions"]
    async with at.busy("one", "two"):
        await refused(at, "model.sessions")
    async with at.stub() as stub:
        assert (await generate(stub, ask("x", model="words", max_tokens=2, ignore_eos=True))).token_ids


async def kinds_of(replies: AsyncIterator[pb.GenerateReply]) -> list[str | None]:
    return [reply.WhichOneof("message") async for reply in replies]


async def test_a_retry_policy_of_grpc_waits_for_a_place(limited: dict[str, Limited]) -> None:
    """Clients of other languages have no retries but those of gRPC, which leading metadata of a refusal would end."""
    at = limited["sessions"]
    policy = {
        "maxAttempts": 5, "initialBackoff": "60s", "maxBackoff": "60s", "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }  # fmt: skip
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    limit = "outrider_requests_refused_by_limit_total", {"limit": "model.sessions"}
    metrics = at.service.sessions.metrics.registry.get_sample_value
    async with grpc.aio.insecure_channel(at.address, [("grpc.service_config", config)]) as channel:
        async with at.busy("one", "two"):
            before = metrics(*limit) or 0
            request = ask("x", model="words", max_tokens=2, ignore_eos=True)
            call = rpc.OutriderStub(channel).Generate(request, metadata=(("authorization", "Bearer one"),), timeout=20)
            reading = asyncio.create_task(kinds_of(call))
            assert await soon(lambda: (metrics(*limit) or 0) > before, 10)
        kinds = await reading
        assert (kinds[0], kinds[-1]) == ("started", "complete"), "asked again when the coordinator said, after 1 s"


async def test_waiting_requests_are_limited(limited: dict[str, Limited]) -> None:
    at = limited["waiting"]
    async with at.busy("one"), at.stub() as stub, at.stub() as another:
        waiting = another.Generate(ask("x", model="words", **LONG), timeout=30)
        await waiting.read()
        await refused(at, "model.waiting")
        waiting.cancel()
        assert await soon(lambda: len(at.service.sessions.live) == 1, 10)
        call = stub.Generate(ask("x", model="words", **LONG), timeout=30)
        assert (await call.read()).HasField("started"), "the place is free again"
        call.cancel()


async def test_sessions_of_a_key_on_a_model_are_limited(limited: dict[str, Limited]) -> None:
    at = limited["keys"]
    async with at.busy("one"), at.stub("two") as bob:
        await refused(at, "model.key_sessions")
        call = bob.Generate(ask("x", model="words", **LONG), timeout=30)
        assert (await call.read()).HasField("started"), "another key's"
        call.cancel()


async def test_sessions_of_the_other_model_do_not_count(limited: dict[str, Limited]) -> None:
    at = limited["keys"]
    async with at.stub() as stub:
        other = stub.Generate(ask("x", model="target", **LONG), timeout=30)
        assert (await other.read()).HasField("started")
        assert len((await generate(stub, ask("x", model="words", max_tokens=2, ignore_eos=True))).token_ids) == 2
        assert [session.target.info.name for session in at.service.sessions.live] == ["target"]
        other.cancel()


async def test_lengths_of_a_model_are_limited(limited: dict[str, Limited]) -> None:
    at = limited["sessions"]
    async with at.api() as api, at.stub() as stub:
        listed: dict[str, Any] = {model.id: model.model_dump() async for model in api.models.list()}
        assert listed["target"]["max_model_len"] == 64 < listed["words"]["max_model_len"]
        assert (await api.models.retrieve("target")).model_dump()["max_model_len"] == 64
        tokens: Any = await api.post("/../tokenize", body={"model": "target", "prompt": "x"}, cast_to=object)
        assert tokens["max_model_len"] == 64
        body: dict[str, Any] = {"model": "target", "prompt": "x", "max_tokens": 17}
        with pytest.raises(openai.BadRequestError, match="at most 16") as caught:
            await api.completions.create(**body)
        assert caught.value.param == "max_tokens"
        await api.completions.create(**body | {"model": "words"})
        body |= {"prompt": "x" * 60, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
        for model, length in (("target", 4), ("words", 16)):
            made = await api.completions.create(**body | {"model": model})
            assert made.usage is not None
            assert (made.usage.completion_tokens, made.choices[0].finish_reason) == (length, "length")
        body |= {"model": "target", "extra_body": {"ignore_eos": True, "min_tokens": 16}}
        with pytest.raises(openai.BadRequestError, match="at most 4: the context is 64 tokens") as caught:
            await api.completions.create(**body)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError, match="must be under the context of 64 tokens") as caught:
            await api.completions.create(model="target", prompt="x" * 64)
        assert caught.value.code == "context_length_exceeded"
        chat = await api.chat.completions.create(
            model="target", messages=[{"role": "user", "content": "x"}], extra_body={"ignore_eos": True}
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 16, "without a length of its own"
        request = ask("x", model="target", ignore_eos=True)
        request.params.ClearField("max_tokens")
        assert len((await generate(stub, request)).token_ids) == 16
        response: pb.GenerateReply = await stub.Generate(ask("x", model="target", max_tokens=16), timeout=10).read()
        assert response.HasField("started")


async def test_a_completion_without_a_length_gets_what_there_is(limited: dict[str, Limited]) -> None:
    async with limited["sessions"].api() as api:
        short = await api.completions.create(model="target", prompt=[7] * 60)
        assert short.usage is not None
        assert short.usage.completion_tokens <= 4, "the context has room for no more"


async def test_the_length_of_chats_without_a_limit_is_a_setting(limited: dict[str, Limited]) -> None:
    """Agents and thinking models send none: theirs were cut after 1,024 tokens."""
    wanted: dict[str, Any] = {"model": "target", "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with limited["keys"].api() as api:
        chat = await api.chat.completions.create(messages=[{"role": "user", "content": "x"}], **wanted)
        response = await api.responses.create(input="x", **wanted)
        completion = await api.completions.create(prompt="x", **wanted)
    lengths = [each.usage and each.usage.completion_tokens for each in (chat, completion)]
    assert lengths == [7, 16], "a completion has as many as OpenAI's"
    assert response.usage is not None
    assert response.usage.output_tokens == 7
