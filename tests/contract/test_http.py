"""The OpenAI-compatible edge as OpenAI's own client sees it, and as strangers do."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from starlette.responses import Response

from coordinator.api.http.replies import CompletionReplies
from outrider.protocol.speculation import TokenKind
from outrider.testing.toy_models import EOS
from tests.cluster import ask, client, generate
from tests.contract.conftest import House, after_joining, slowed, soon

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "One and one is two, and one and one is two, and one and one is"
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say something, say something."}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def api(house: House) -> AsyncIterator[AsyncOpenAI]:
    base = f"http://{house.service.http_address}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=30) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def web(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{house.service.http_address}", timeout=30) as made:
        yield made


@pytest.fixture(scope="module")
def model(house: House) -> str:
    return house.service.sessions.targets.named("").info.name


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_a_completion_is_what_grpc_says(api: AsyncOpenAI, house: House, model: str) -> None:
    found = await api.completions.create(model=model, prompt=PROMPT, max_tokens=40, temperature=0)
    async with client(house.coordinator) as stub:
        output = await generate(stub, ask(PROMPT, max_tokens=40, temperature=0.0))
    assert found.choices[0].text == output.text
    assert found.choices[0].finish_reason == output.finish.name.lower()
    assert found.usage is not None
    assert found.usage.completion_tokens == len(output.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.system_fingerprint == house.service.sessions.targets.named("").info.fingerprint
    assert found.object == "text_completion"


async def test_a_chat_streams_what_it_would_say_at_once(api: AsyncOpenAI, model: str) -> None:
    wanted: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 50, "seed": 7}
    whole = await api.chat.completions.create(**wanted)
    stream = await api.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_ends_in_done_and_says_its_usage_only_when_asked(web: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "stream": True}
    async with web.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not any("usage" in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert "speculative_decoding" in events[-1]["metrics"]


async def test_a_seed_decides_and_every_choice_has_its_own(api: AsyncOpenAI, model: str) -> None:
    wanted: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    three = await api.completions.create(**wanted, n=3, seed=41)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({choice.text for choice in three.choices}) == 3
    second = await api.completions.create(**wanted, seed=42)
    assert second.choices[0].text == three.choices[1].text
    assert three.usage is not None
    assert second.usage is not None
    assert three.usage.prompt_tokens == second.usage.prompt_tokens, "one prompt"
    assert three.usage.completion_tokens == 60
    stream = await api.completions.create(**wanted, n=3, seed=41, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in three.choices]


async def test_a_batch_of_prompts_is_as_long_as_the_limit_of_answers(api: AsyncOpenAI, model: str) -> None:
    """lm-evaluation-harness with a batch size above 16 was refused, where 64 answers may be asked for."""
    prompts = [f"{number}, {number + 1}, " for number in range(20)]
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0, "seed": 1234, "logprobs": 1}
    found = await api.completions.create(prompt=prompts, **body, echo=True)
    last = await api.completions.create(prompt=prompts[-1], **body)
    assert [choice.index for choice in found.choices] == list(range(20))
    assert [choice.text[: len(prompt)] for choice, prompt in zip(found.choices, prompts, strict=True)] == prompts
    assert found.choices[-1].text == prompts[-1] + last.choices[0].text
    with pytest.raises(openai.BadRequestError, match="prompt is 65 answers, must be at most 64"):
        await api.completions.create(prompt=["x"] * 65, **body)
    with pytest.raises(openai.BadRequestError, match="n is 66 answers, must be at most 64"):
        await api.completions.create(prompt=["x"] * 33, **body, n=2)


async def test_several_prompts_and_token_ids(api: AsyncOpenAI, house: House, model: str) -> None:
    ids = list(house.service.sessions.targets.named("").encode("A second prompt"))
    both = await api.completions.create(model=model, prompt=[PROMPT, "A second prompt"], max_tokens=8, temperature=0)
    alone = await api.completions.create(model=model, prompt=ids, max_tokens=8, temperature=0, echo=True)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert alone.choices[0].text == "A second prompt" + both.choices[1].text


async def test_a_stop_string_ends_the_text_before_it(api: AsyncOpenAI, house: House, model: str) -> None:
    # No stop string is found across special tokens.
    unwanted = {str(end): -100 for end in house.service.sessions.targets.named("").info.eos_token_ids}
    wanted: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "seed": 3, "logit_bias": unwanted}
    plain = await api.completions.create(model=model, **wanted)
    text = plain.choices[0].text
    stop = text[20:23]
    found = await api.completions.create(model=model, **wanted, stop=[stop, "\0never"])
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


async def test_log_probabilities(api: AsyncOpenAI, model: str) -> None:
    wanted: dict[str, Any] = {"model": model, "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = await api.chat.completions.create(messages=CHAT, max_tokens=12, logprobs=True, top_logprobs=3, **wanted)
    found = chat.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 12
    said = b"".join(bytes(token.bytes or []) for token in found.content if token.token != EOS)
    assert said.decode(errors="replace") == chat.choices[0].message.content
    for token in found.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob), "greedy takes the likeliest"
    text = await api.completions.create(prompt=PROMPT, max_tokens=6, logprobs=2, **wanted)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 6
    assert logprobs.text_offset[0] == 0


@pytest.mark.parametrize("logprobs", [None, 20])
async def test_only_an_answer_with_log_probabilities_is_written_beside_the_loop(
    web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """With 20 of them for each of 4,096 tokens all other streams waited for half a second."""
    threads = []

    def noting(method: Any) -> Any:
        def noted(*given: Any, **more: Any) -> Any:
            threads.append(threading.get_ident())
            return method(*given, **more)

        return noted

    monkeypatch.setattr(CompletionReplies, "_choice", noting(CompletionReplies._choice))
    monkeypatch.setattr(Response, "__init__", noting(Response.__init__))
    body = {"prompt": "So", "n": 2, "max_tokens": 20, "ignore_eos": True, "logprobs": logprobs}
    assert (await web.post("/v1/completions", json=body)).status_code == 200
    assert len(threads) == 3
    assert (threading.get_ident() in threads) is (logprobs is None)


async def test_streamed_log_probabilities_are_the_same(api: AsyncOpenAI, model: str) -> None:
    wanted: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 20, "seed": 5, "logprobs": True}
    whole = await api.chat.completions.create(**wanted)
    stream = await api.chat.completions.create(**wanted, stream=True)
    tokens: list[Any] = []
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        tokens += logprobs.content or [] if logprobs else []
    assert whole.choices[0].logprobs is not None
    assert [t.token for t in tokens] == [t.token for t in whole.choices[0].logprobs.content or []]


async def test_biases_and_penalties_reach_the_target(api: AsyncOpenAI, house: House, model: str) -> None:
    (token,) = house.service.sessions.targets.named("").encode("x", special=False)
    found = await api.completions.create(
        model=model, prompt=PROMPT, max_tokens=10, logit_bias={str(token): 100}, extra_body={"top_k": 1}
    )
    assert found.choices[0].text == "x" * 10


async def test_what_speculation_did_is_told_in_the_customary_shape(web: httpx.AsyncClient, house: House) -> None:
    body = {"prompt": PROMPT, "max_tokens": 64, "ignore_eos": True, "temperature": 0, "speculation": {"gamma": 4}}
    with after_joining(house.loaded, house.service):
        found = (await web.post("/v1/completions", json=body)).json()["metrics"]
    spec = found["speculative_decoding"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] > 0
    accepted = sum(j * steps for j, steps in enumerate(spec["acceptance_histogram"]))
    assert accepted == spec["num_accepted_draft_tokens"]
    assert spec["mean_acceptance_length"] == pytest.approx(1 + accepted / spec["num_spec_steps"])
    assert spec["draft_acceptance_rate"] == pytest.approx(accepted / spec["num_draft_tokens"])
    assert found["outrider"]["tokens_per_second"] > 0
    plain = (await web.post("/v1/completions", json=body | {"speculation": {"gamma": 0}})).json()["metrics"]
    assert plain["speculative_decoding"]["num_spec_steps"] == 0


async def test_guesses_can_be_shown(web: httpx.AsyncClient) -> None:
    """Of whole characters: what a limit leaves of one is text of no token."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "speculation": {"show": True}}
    body |= {"response_format": {"type": "regex", "regex": "(?s:.){15}"}, "stream_options": {"include_usage": True}}
    shown: list[str] = []
    text = characters = 0
    *chunks, last = [json.loads(event) for event in await events_of(web, "/v1/completions", body)]
    for (choice,) in (chunk["choices"] for chunk in chunks):
        text += len(choice["text"])
        shown += choice["speculation"]["kinds"]
        characters += sum(choice["speculation"]["characters"])
    assert len(shown) == last["usage"]["completion_tokens"]
    assert set(shown) <= {kind.name.lower() for kind in TokenKind}
    assert text == characters == 15


async def test_an_idempotency_key_never_generates_twice(web: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
    headers = {"Idempotency-Key": "the-same-again"}
    first, second = [(await web.post("/v1/completions", json=body, headers=headers)).json() for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert first["id"] == second["id"]
    other = await web.post("/v1/completions", json=body | {"max_tokens": 13}, headers=headers)
    assert other.status_code == 409
    several = await web.post("/v1/completions", json=body | {"n": 2}, headers={"Idempotency-Key": "order"})
    assert several.status_code == 200
    own = await web.post("/v1/completions", json=body | {"max_tokens": 5}, headers={"Idempotency-Key": "order/1"})
    assert own.json()["usage"]["completion_tokens"] == 5, "a key of its own, not that of the second answer"
    longest = [
        await web.post("/v1/completions", json=body | {"n": n}, headers={"Idempotency-Key": "k" * 256}) for n in (2, 2)
    ]
    assert [reply.status_code for reply in longest] == [200, 200]
    assert longest[0].json()["choices"] == longest[1].json()["choices"]


# --- shapes ----------------------------------------------------------------------------------------------------------


async def events_of(web: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    async with web.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = "".join([part async for part in response.aiter_text()])
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: {") for part in parts[:-2])
    return [part.removeprefix("data: ") for part in parts[:-2]]


def unknown(made: Any, path: str = "") -> set[str]:
    """Fields that OpenAI's own types do not have, anywhere in a reply."""
    if isinstance(made, list):
        return {name for each in made for name in unknown(each, path)}
    if not hasattr(made, "model_extra"):
        return set()
    found = {f"{path}{name}" for name in made.model_extra or {}}
    for name in type(made).model_fields:
        found |= unknown(getattr(made, name), f"{path}{name}.")
    return found


CHATTING = "/v1/chat/completions"
COMPLETING = "/v1/completions"


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stop": "e"}])
async def test_a_chat_has_openais_shape(web: httpx.AsyncClient, more: dict[str, Any]) -> None:
    body = {"messages": CHAT, "max_tokens": 12, "seed": 3, **more}
    whole = ChatCompletion.model_validate_json((await web.post(CHATTING, json=body)).content, strict=True)
    assert unknown(whole) <= {"metrics"}
    assert whole.id.startswith("chatcmpl-")
    assert [choice.index for choice in whole.choices] == list(range(more.get("n", 1)))
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = await events_of(web, CHATTING, body | options)
        chunks = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in events]
        assert {name for chunk in chunks for name in unknown(chunk)} <= {"metrics"}
        for choice in whole.choices:
            mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert [c.delta.role for c in mine] == ["assistant", *[None] * (len(mine) - 1)]
            assert "".join(c.delta.content or "" for c in mine) == choice.message.content
            assert [c.finish_reason for c in mine] == [*[None] * (len(mine) - 1), choice.finish_reason]
        assert [chunk.usage is not None for chunk in chunks] == [*[False] * (len(chunks) - 1), bool(options)]
        assert all(("usage" in event) == bool(options) for event in map(json.loads, events))


@pytest.mark.parametrize("more", [{}, {"n": 2, "echo": True}, {"logprobs": 2}, {"logprobs": 0, "stop": "e"}])
async def test_a_completion_has_openais_shape(web: httpx.AsyncClient, more: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, **more}
    whole = Completion.model_validate_json((await web.post(COMPLETING, json=body)).content, strict=True)
    assert unknown(whole) <= {"metrics"}
    assert whole.id.startswith("cmpl-")
    events = await events_of(web, COMPLETING, body)
    reasons: list[str | None] = []
    for event in map(json.loads, events):
        reasons += [choice["finish_reason"] for choice in event["choices"]]
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # the type forgets what OpenAI itself sends
        assert unknown(Completion.model_validate(event, strict=True)) <= {"metrics"}
    assert [reason for reason in reasons if reason] == [choice.finish_reason for choice in whole.choices]
    for choice in whole.choices:
        mine = [c for event in map(json.loads, events) for c in event["choices"] if c["index"] == choice.index]
        assert "".join(c["text"] for c in mine) == choice.text
        if choice.logprobs is None:
            assert all(c["logprobs"] is None for c in mine)
        else:
            told = [c["logprobs"] for c in mine if c["logprobs"]]
            assert [token for each in told for token in each["tokens"]] == choice.logprobs.tokens
            assert [at for each in told for at in each["text_offset"]] == choice.logprobs.text_offset


async def test_models_have_openais_shape(web: httpx.AsyncClient, model: str) -> None:
    found = Model.model_validate_json((await web.get(f"/v1/models/{model}")).content, strict=True)
    assert (found.id, found.object, found.owned_by) == (model, "model", "outrider")


async def test_an_answer_can_be_sent_back_as_it_came(api: AsyncOpenAI, model: str) -> None:
    first = await api.chat.completions.create(model=model, messages=CHAT, max_tokens=4, temperature=0)
    message = first.choices[0].message
    for said in (message, message.model_dump()):
        talk: list[Any] = [*CHAT, said, {"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
        again = await api.chat.completions.create(model=model, messages=talk, max_tokens=4, temperature=0)
        assert again.choices[0].message.content


class Thing(BaseModel):
    ok: bool


async def test_what_openais_client_made_of_an_answer_can_be_sent_back(api: AsyncOpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": CHAT, "seed": 3, "response_format": Thing}
    parsed = (await api.chat.completions.parse(**asked)).choices[0].message
    async with api.chat.completions.stream(**asked) as stream:
        streamed = (await stream.get_final_completion()).choices[0].message
    for said in (parsed, streamed):
        assert isinstance(said.parsed, Thing)
        talk: list[Any] = [*CHAT, said.to_dict(mode="json", warnings=False)]  # as the client sends it
        assert (await api.chat.completions.create(model=model, messages=talk, max_tokens=4)).choices


async def test_what_only_labels_a_request_is_taken(api: AsyncOpenAI, model: str) -> None:
    labels: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "z"},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "response_format": {"type": "text"},
    }
    found = await api.chat.completions.create(model=model, messages=CHAT, max_tokens=2, seed=1, **labels)
    plain = await api.chat.completions.create(model=model, messages=CHAT, max_tokens=2, seed=1)
    assert found.choices == plain.choices


# --- around answers --------------------------------------------------------------------------------------------------


async def test_models(api: AsyncOpenAI, model: str) -> None:
    assert [each.id async for each in api.models.list()] == [model]
    assert (await api.models.retrieve(model)).id == model
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("gpt-4")


async def test_health_readiness_and_the_fleet(web: httpx.AsyncClient) -> None:
    assert (await web.get("/health")).json() == {"status": "ok"}
    assert (await web.get("/ready")).status_code == 200
    fleet = (await web.get("/fleet")).json()
    assert sorted(worker["role"] for worker in fleet["workers"]) == ["drafter", "drafter", "verifier"]
    assert fleet["durable"] is True


async def test_metrics_are_those_of_the_coordinator(web: httpx.AsyncClient) -> None:
    page = await web.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert "outrider_spec_decode_num_drafts_total" in page.text


async def test_every_answer_has_a_request_id(web: httpx.AsyncClient) -> None:
    mine = await web.get("/health", headers={"x-request-id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    drawn = await web.post("/v1/completions", content=b"{", headers={"x-request-id": "no spaces allowed"})
    assert len(drawn.headers["x-request-id"]) == 32


async def test_the_document_describes_all_routes(web: httpx.AsyncClient) -> None:
    document = (await web.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(document["paths"])
    page = await web.get("/docs")
    assert "openapi.json" in page.text


# --- what cannot be answered -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens"),
        ({"prompt": PROMPT, "max_tokens": 10**6}, "max_tokens"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature"),
        ({"prompt": PROMPT, "temperature": "hot"}, "temperature"),
        ({"prompt": PROMPT, "top_p": 0}, "top_p"),
        ({"prompt": PROMPT, "n": 99}, "n"),
        ({"prompt": PROMPT, "stop": [""]}, "stop.0"),
        ({"prompt": PROMPT, "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": PROMPT, "logit_bias": {"4000000": 1}}, "logit_bias"),
        ({"prompt": PROMPT, "best_of": 4}, "body"),
        ({"prompt": [999_999]}, "prompt[0]"),
        ({"prompt": [[65], [65, 999_999]]}, "prompt.1"),
        ({"prompt": [PROMPT, PROMPT, "a" * 5_000]}, "prompt.2"),
        ({"prompt": PROMPT, "stream": True, "prompt_logprobs": 0}, "body"),
        ({"prompt": PROMPT, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": PROMPT, "max_token": 3}, "max_token"),
        ({"prompt": PROMPT, "speculation": {"gamma": 65}}, "speculation.gamma"),
        ({"prompt": PROMPT, "stream_options": {"include_usage": True}}, "body"),
    ],
)
async def test_bad_completions_are_refused_by_name(web: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    reply = await web.post("/v1/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param), error
    assert error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"tools": [{"type": "function", "function": {}}]},
        {"functions": [{"name": "f"}]},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"response_format": {"type": "json_schema"}},
        {"speculation": {"verification": "typical"}},
        {"temperature": 0, "speculation": {"verification": "block"}},
    ],
)
async def test_bad_chats_are_refused(api: AsyncOpenAI, model: str, change: dict[str, Any]) -> None:
    body = {"messages": CHAT, "max_tokens": 4, "model": model} | change
    with pytest.raises(openai.BadRequestError) as caught:
        await api.chat.completions.create(extra_body={k: body.pop(k) for k in ("speculation",) if k in body}, **body)
    assert caught.value.body


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 400), (b"{", 400), (b"[1]", 400), (b"\xff", 400), (b'{"prompt": NaN}', 400), (b"[" * 100_000, 400)],
    ids=["empty", "cut off", "a list", "no text", "no number", "deep"],
)
async def test_what_is_no_json_is_told(web: httpx.AsyncClient, content: bytes, status: int) -> None:
    reply = await web.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == status
    assert reply.json()["error"]["param"] in ("body", "prompt")


async def test_other_media_methods_and_paths(web: httpx.AsyncClient) -> None:
    form = await web.post("/v1/completions", data={"prompt": "x"})
    assert form.status_code == 415, "a page of another origin could send this without asking"
    wrong = await web.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    nowhere = await web.get("/v1/nothing")
    assert nowhere.status_code == 404
    assert "/docs lists the paths" in nowhere.json()["error"]["message"], "as to clients whose base URL lacks /v1"
    assert nowhere.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_not_read_to_its_end(web: httpx.AsyncClient, house: House) -> None:
    reply = await web.post("/v1/completions", json={"prompt": "x" * (13 * 1024 * 1024)})
    assert reply.status_code == 413


async def test_an_unknown_model_is_not_found(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.completions.create(model="gpt-4", prompt=PROMPT)
    assert caught.value.code == "model_not_found"


# --- going away ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_session(web: httpx.AsyncClient, house: House, stream: bool) -> None:
    sessions = house.service.sessions
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": stream, "n": 2}
    with slowed(house.loaded, 0.02):  # they must not end before they are left
        asking = asyncio.create_task(web.post("/v1/completions", json=body))
        assert await soon(lambda: len(sessions.live) == 2, 10)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await soon(lambda: len(sessions.live) == 0, 10)


async def test_a_session_that_is_cancelled_elsewhere_ends_its_stream(web: httpx.AsyncClient, house: House) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    key = {"Idempotency-Key": "cancelled-elsewhere"}
    async with web.stream("POST", "/v1/completions", json=body, headers=key) as response:
        async for line in response.aiter_lines():
            if not lines:
                (session,) = house.service.sessions.live
                await house.service.sessions.cancel(session.record.session_id)
            lines.append(line)
    assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"
    *events, error = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {event["choices"][0]["finish_reason"] for event in events} == {None}, "it has not come to its end"
    assert (error["error"]["code"], error["error"]["type"]) == ("cancelled", "cancelled")
    again = await web.post("/v1/completions", json=body | {"stream": False}, headers=key)
    assert (again.status_code, again.json()) == (499, error)


# --- grammars --------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}


async def test_an_answer_follows_its_json_schema(api: AsyncOpenAI, model: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        found = await api.chat.completions.create(
            model=model, messages=CHAT, seed=seed, max_tokens=300, response_format=wanted
        )
        assert found.choices[0].finish_reason == "stop"
        said = json.loads(found.choices[0].message.content or "")
        assert set(said) == {"ok", "size"}
        assert isinstance(said["ok"], bool)


async def test_an_answer_is_any_json_object_or_matches_an_expression(api: AsyncOpenAI, model: str) -> None:
    found = await api.chat.completions.create(
        model=model, messages=CHAT, seed=1, max_tokens=40, response_format={"type": "json_object"}
    )
    assert (found.choices[0].message.content or "").startswith("{")
    text = await api.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=40,
        extra_body={"response_format": {"type": "regex", "regex": "(yes|no), [0-9]{3}"}},
    )
    assert re.fullmatch("(yes|no), [0-9]{3}", text.choices[0].text)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"json": SCHEMA, "regex": None}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        ({"json_object": True}, {"type": "json_object"}),
        ({"regex": "(yes|no), [0-9]{3}"}, {"type": "regex", "regex": "(yes|no), [0-9]{3}"}),
        ({"choice": ["a.b\n/", "(yes", "no"]}, {"type": "regex", "regex": r"a\.b\n/|\(yes|no"}),
    ],
    ids=lambda value: next(iter(value)),
)
async def test_vllms_structured_outputs_are_formats(
    api: AsyncOpenAI, model: str, given: dict[str, Any], form: dict[str, Any]
) -> None:
    """Outlines' client for vLLM sends them in chats; vLLM takes them in the other two, too."""
    asked: dict[str, Any] = {"model": model, "messages": CHAT, "seed": 3, "max_tokens": 40}
    texts = [
        (await api.chat.completions.create(**asked, extra_body=more)).choices[0].message.content
        for more in ({"structured_outputs": given, "response_format": {"type": "text"}}, {"response_format": form})
    ]
    assert texts[0] == texts[1]
    asked = {"model": model, "input": CHAT, "max_output_tokens": 40}
    said = await api.responses.create(**asked, extra_body={"structured_outputs": given, "seed": 3})
    assert said.output_text == texts[0]
    pair = [
        (await api.completions.create(model=model, prompt=PROMPT, seed=3, max_tokens=40, extra_body=more))
        .choices[0]
        .text
        for more in ({"structured_outputs": given}, {"response_format": form})
    ]
    assert pair[0] == pair[1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "body"),
    ],
)
async def test_structured_outputs_that_cannot_be_are_refused_by_name(
    api: AsyncOpenAI, model: str, body: dict[str, Any], param: str
) -> None:
    calls: list[Any] = [
        api.chat.completions.create(model=model, messages=CHAT, extra_body=body),
        api.completions.create(model=model, prompt=PROMPT, extra_body=body),
    ]
    if "response_format" not in body:
        calls.append(api.responses.create(model=model, input="Hello", extra_body=body))
    for call in calls:
        with pytest.raises(openai.BadRequestError) as caught:
            await call
        assert caught.value.param == param, caught.value


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        {"type": "regex", "regex": "("},
        {"type": "text", "regex": "a"},
        {"type": "xml"},
    ],
)
async def test_formats_that_cannot_be_are_refused(api: AsyncOpenAI, model: str, wanted: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.chat.completions.create(model=model, messages=CHAT, extra_body={"response_format": wanted})
    assert str(caught.value.param or "").startswith("response_format")


async def test_the_usage_so_far_may_come_with_each_chunk(web: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 12, "n": 2, "ignore_eos": True, "stream_options": options}
    *chunks, last = [json.loads(event) for event in await events_of(web, "/v1/completions", body)]
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert 0 < told[0] <= told[-1] == last["usage"]["completion_tokens"] == 24
    assert last["choices"] == []
