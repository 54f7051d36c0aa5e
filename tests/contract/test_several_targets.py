"""Two targets behind one coordinator: a request's model chooses, and everything follows it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from transformers import AutoTokenizer, LlamaForCausalLM

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until as soon
from outrider.client.aio import AsyncClient
from outrider.engine.loading.loader import LoadedModel, load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.errors import Conflict, ModelMismatch, NotFound
from outrider.protocol.fleet import Role, WorkerInfo
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import make_model
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import Output as Answer
from tests.cluster import Redis, ask, client, failure, follow, generate, in_process
from tests.conftest import Models
from tests.contract.conftest import HEARTBEAT_MS, verifier_serving

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

PROMPT = "Two are better than one, and two are better than none. Two are "
LENGTH = 24
DIFFERING = 120  # tokens: some of them are certainly not among the likeliest
RECOMMENDED = {"temperature": 0.4, "top_k": 7}  # of `words`, by its makers


@dataclass(frozen=True, slots=True)
class Both:
    address: str
    service: CoordinatorService
    texts: dict[str, str]  # of the targets alone
    early: dict[str, asyncio.Task[Answer]]  # asked before any worker had registered

    async def answer(self, model: str = "", **params: Any) -> Answer:
        return await answer(self.address, model, **params)


async def answer(address: str, model: str, **params: Any) -> Answer:
    given = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True} | params
    async with client(address) as stub:
        return await generate(stub, ask(PROMPT, model=model, **given))


def alone(folder: Path) -> str:
    """Return what transformers generates."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.encode(PROMPT)
    with torch.inference_mode():
        for _ in range(LENGTH):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return str(tokenizer.decode(tokens[-LENGTH:], skip_special_tokens=True))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(
    loaded: LoadedModel, models: Models, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Both]:
    settings = CoordinatorSettings(
        http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5, default_model="words", alias="small=words,first=target"
    )
    service = CoordinatorService(settings, redis_server.url)
    folder = tmp_path_factory.mktemp("words")
    shutil.copytree(models.other_vocabulary, folder, dirs_exist_ok=True)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | RECOMMENDED))
    words = load_model(str(folder), EngineOptions(device="cpu"))
    # Before anything is served: for as long as transformers loads, this process answers nobody.
    texts = {"target": alone(models.target), "words": alone(models.other_vocabulary)}
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(in_process(service, settings))
        targets = service.sessions.targets
        assert targets.settle_s == 5 * HEARTBEAT_MS / 1000
        targets.settle_s = 60.0  # a busy machine takes longer
        early = {model: asyncio.create_task(answer(address, model)) for model in ("", "target", "words", "small")}
        for each, named in ((loaded, {}), (words, {"served_model_name": "words"})):
            folder = tmp_path_factory.mktemp("tokenizer")
            await stack.enter_async_context(verifier_serving(each, folder, coordinators=address, **named))
        pool = service.sessions.worker_pool
        assert await soon(lambda: len(pool.connections()) == 2, 20)
        targets.settle_s = 0.5
        yield Both(address, service, texts, early)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def api(both: Both) -> AsyncIterator[AsyncOpenAI]:
    base = f"http://{both.service.http_address}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=30) as made:
        yield made


async def test_each_model_answers_as_it_does_alone(both: Both, api: AsyncOpenAI) -> None:
    assert both.texts["target"] != both.texts["words"]
    for name, model in {"target": "target", "first": "target", "words": "words", "small": "words", "": "words"}.items():
        assert (await both.answer(name)).text == both.texts[model]
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0}
        found = await api.completions.create(model=name, **body, extra_body={"ignore_eos": True})
        assert (found.choices[0].text, found.model) == (both.texts[model], model)


async def test_what_a_request_leaves_out_is_what_the_models_makers_recommend(both: Both, api: AsyncOpenAI) -> None:
    async def text(model: str, *, temperature: float | None = None, **more: Any) -> str:
        body: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
        asked = {"ignore_eos": True, **more}
        made = await api.completions.create(
            model=model, prompt=PROMPT, max_tokens=DIFFERING, seed=1, **body, extra_body=asked
        )
        return made.choices[0].text

    assert await text("words") == await text("words", **RECOMMENDED)
    assert len({await text("words"), await text("words", top_k=-1), await text("words", temperature=1)}) == 3
    assert await text("target") == await text("target", temperature=1)
    told = await both.answer("words", temperature=1.0, seed=1, max_tokens=DIFFERING)
    assert told.text == await text("words", temperature=1, top_k=0), "over gRPC, absent fields have fixed defaults"
    async with client(both.address) as stub:
        info = await stub.GetModelInfo(common.GetModelInfoRequest(model="words"))
    assert info.sampling == common.SamplingDefaults(**RECOMMENDED)


async def test_requests_wait_for_workers_that_register(both: Both) -> None:
    """The first to register is no target of three of them."""
    for model, task in both.early.items():
        assert (await task).text == both.texts["target" if model == "target" else "words"]


async def test_models_are_listed_with_their_aliases(api: AsyncOpenAI) -> None:
    listed: dict[str, Any] = {model.id: model async for model in api.models.list()}
    assert list(listed) == ["words", "target", "small", "first"]
    assert (listed["small"].root, listed["first"].root) == ("words", "target")
    assert (await api.models.retrieve("first")).id == "first"


async def test_an_unknown_model_is_404_everywhere(both: Both, api: AsyncOpenAI) -> None:
    for call in (
        api.completions.create(model="gpt-9", prompt="x"),
        api.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}]),
        api.responses.create(model="gpt-9", input="x"),
        api.models.retrieve("gpt-9"),
        api.post("/../tokenize", body={"model": "gpt-9", "prompt": "x"}, cast_to=object),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here, only "):
            await call
    async with client(both.address) as stub:
        status, error, _ = await failure(stub.Generate(ask("x", model="gpt-9"), timeout=10))
        assert (status, type(error)) == (grpc.StatusCode.NOT_FOUND, NotFound)
        status, _, _ = await failure(stub.GetModelInfo(common.GetModelInfoRequest(model="gpt-9"), timeout=10))
        assert status is grpc.StatusCode.NOT_FOUND


async def test_tokens_and_models_are_the_named_targets(both: Both, api: AsyncOpenAI) -> None:
    for name, size in (("target", 257), ("words", 258)):
        body = {"model": name, "prompt": "<|extra|>"}
        found: Any = await api.post("/../tokenize", body=body, cast_to=object)
        assert found["count"] == (1 if name == "words" else len("<|extra|>"))
        async with AsyncClient([both.address]) as asking:
            assert (await asking.model(name)).vocab_size == size
            assert (await asking.complete("x", model=name)).started.model == name


async def test_a_session_resumes_on_its_own_target(both: Both) -> None:
    for name in ("target", "words"):
        output = await both.answer(name)
        async with client(both.address) as stub:
            call = stub.Resume(pb.ResumeRequest(session_id=output.session_id), timeout=10)
            assert (await follow(call, Answer())).text == output.text


async def test_an_idempotency_key_belongs_to_one_model(both: Both) -> None:
    async with client(both.address) as stub:
        given: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "key": "one key"}
        first = await generate(stub, ask([1, 2, 3], model="target", **given))
        again = await generate(stub, ask([1, 2, 3], model="target", **given))
        assert again.session_id == first.session_id
        _, error, _ = await failure(stub.Generate(ask([1, 2, 3], model="words", **given), timeout=10))
        assert isinstance(error, Conflict)
        given |= {"max_tokens": 400, "ignore_eos": True, "key": "of one that its client has left"}
        left = stub.Generate(ask([1, 2, 3], model="target", **given), timeout=10)
        await left.read()
        left.cancel()
        assert await soon(lambda: not both.service.sessions.live, 10)
        _, error, _ = await failure(stub.Generate(ask([1, 2, 3], model="words", **given), timeout=10))
        assert isinstance(error, Conflict)
        assert not both.service.sessions.live


async def test_metrics_are_per_model(both: Both) -> None:
    def requests(model: str) -> float:
        name = "outrider_request_success_total"
        found = both.service.sessions.metrics.registry.get_sample_value
        return found(name, {"model_name": model, "finished_reason": "length"}) or 0.0

    before = requests("target"), requests("words")
    await both.answer("target", seed=7)
    assert (requests("target"), requests("words")) == (before[0] + 1, before[1])


async def test_a_verifier_with_another_target_of_the_same_name_is_refused(both: Both) -> None:
    pool = both.service.sessions.worker_pool
    ours = pool.targets.named("target").info
    other = WorkerInfo("other", Role.VERIFIER, "127.0.0.1:1", replace(ours, fingerprint="another"), "target")
    with pytest.raises(ModelMismatch, match="serves target, the others target; first difference: fingerprint"):
        pool.compatibility.check(other)


async def test_targets_have_widths_of_their_own(models: Models, redis_server: Redis, tmp_path: Path) -> None:
    """No weights of `both`, which Redis still names: of equal weights under two names only the first has workers."""
    wide = load_model(str(models.other_target), EngineOptions(device="cpu"))
    narrow = load_model(str(make_model(tmp_path / "model", seed=8, hidden=32)), EngineOptions(device="cpu"))
    settings = CoordinatorSettings(heartbeat_ms=HEARTBEAT_MS, worker_wait_s=20)
    service = CoordinatorService(settings, redis_server.url)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(in_process(service, settings))
        for name, each in (("wide", wide), ("narrow", narrow)):
            (folder := tmp_path / name).mkdir()
            named: Any = {"served_model_name": name, "coordinators": address}
            await stack.enter_async_context(verifier_serving(each, folder, **named))
        assert await soon(lambda: len(service.sessions.worker_pool.connections()) == 2, 20)
        assert len((await answer(address, "narrow", max_tokens=3)).token_ids) == 3
