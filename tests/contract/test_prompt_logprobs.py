"""Log probabilities of prompts (`echo` with `logprobs`), against the target as transformers runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, BadRequestError
from openai.types.completion_choice import Logprobs
from transformers import LlamaForCausalLM

from coordinator.api.http.agents import prompt_logprobs
from tests.contract.conftest import House
from tests.contract.test_tools import api

__all__ = ["api"]

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "Two heads are better than one: 世界."
OUTPUT = 4
ASK: dict[str, Any] = {"model": "", "max_tokens": OUTPUT, "temperature": 0, "echo": True, "logprobs": 3}


def body(gamma: int) -> dict[str, Any]:
    return {"extra_body": {"ignore_eos": True, "speculation": {"gamma": gamma}}}


@pytest.mark.parametrize("gamma", [0, 4])
async def test_they_are_the_targets(
    api: AsyncOpenAI, house: House, plain_target: LlamaForCausalLM, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of end tokens too, and across the sessions that write a long prompt."""
    target = house.service.sessions.targets.named("")
    end = target.info.eos_token_ids[0]
    words = list(target.encode(TEXT))
    monkeypatch.setattr(prompt_logprobs, "_MOST", 11)
    tokens = [*words, end, end, *words[:9], end]
    found = (await api.completions.create(prompt=tokens, **ASK, **body(gamma))).choices[0]
    told = found.logprobs
    assert told is not None
    assert told.tokens is not None
    assert len(told.tokens) == len(tokens) + OUTPUT
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    with torch.inference_mode():
        wanted = torch.log_softmax(plain_target(torch.tensor([tokens])).logits[0].double(), -1)
    for at, token in enumerate(tokens[1:]):
        assert told.token_logprobs[at + 1] == pytest.approx(wanted[at, token].item(), abs=2e-4), at
        best, likeliest = sorted(told.top_logprobs[at + 1].values(), reverse=True), wanted[at].topk(3)
        own = [] if token in likeliest.indices else [wanted[at, token].item()]  # is among them in any case
        assert best == pytest.approx([*likeliest.values.tolist(), *own], abs=2e-4), at
    assert told.token_logprobs[len(tokens)] == pytest.approx(wanted[-1].max().item(), abs=2e-4)
    plain = await api.completions.create(prompt=tokens, **ASK | {"logprobs": None}, **body(gamma))
    assert plain.choices[0].text == found.text


@pytest.mark.parametrize("prompts", [[TEXT, "One."], [TEXT, "One.\N{REPLACEMENT CHARACTER}"]])
async def test_streams_and_choices_tell_the_same(api: AsyncOpenAI, prompts: list[str]) -> None:
    """The prompts come first, each with its own, and offsets count from the beginning of the text."""
    given = ASK | {"prompt": prompts, "n": 2, "temperature": 1, "seed": 7}
    whole = (await api.completions.create(**given, **body(0))).choices
    parts: dict[int, list[Logprobs]] = {}
    async for chunk in await api.completions.create(**given, stream=True, **body(0)):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                parts.setdefault(choice.index, []).append(choice.logprobs)
    assert whole[0].logprobs is not None
    assert whole[0].text.startswith(TEXT)
    assert whole[2].text.startswith("One.")
    for choice in whole:
        told = parts[choice.index]
        assert len(told) > 1
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [each for part in told for each in getattr(part, name)] == getattr(choice.logprobs, name)
    words = "".join(whole[2].text[at] for at in whole[2].logprobs.text_offset[:4])
    assert words == "One."


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_without_an_output_a_prompt_can_be_scored(api: AsyncOpenAI, logprobs: int | None) -> None:
    """As evaluation harnesses do, with a text or its tokens."""
    given = ASK | {"prompt": [TEXT, "One."], "max_tokens": 0, "logprobs": logprobs}
    whole = (await api.completions.create(**given)).choices
    assert [choice.text for choice in whole] == [TEXT, "One."]
    texts, ends = ["", ""], list[str]()
    async for chunk in await api.completions.create(**given, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (texts, len(ends)) == ([TEXT, "One."], 2)
    scored = (await api.completions.create(**given | {"max_tokens": 1})).choices if logprobs else []
    for one, more in zip(whole, scored, strict=bool(logprobs)):
        assert one.logprobs is not None is not more.logprobs
        assert one.logprobs.token_logprobs == (more.logprobs.token_logprobs or [])[:-1]
        assert one.logprobs.text_offset == (more.logprobs.text_offset or [])[:-1]


async def test_a_prompt_of_one_token(api: AsyncOpenAI) -> None:
    told = (await api.completions.create(prompt=[65], **ASK)).choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert [value is None for value in told.token_logprobs[:2]] == [True, False]


async def test_a_prompt_of_many_end_tokens_is_refused(
    api: AsyncOpenAI, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a session, and none is started."""
    end, started = house.service.sessions.targets.named("").info.eos_token_ids[0], list[Any]()
    monkeypatch.setattr(prompt_logprobs, "start_answer", lambda *given: started.append(given))
    with pytest.raises(BadRequestError, match="260 parts of 4000 tokens or to an end token, must be at most 258"):
        await api.completions.create(prompt=[[65, *[end] * 259], [65, 66]], **ASK)
    assert not started


async def test_a_long_chat_whose_messages_end_with_end_tokens_has_them(
    api: AsyncOpenAI, house: House, plain_target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ChatML. More than sixteen messages were refused: each took two sessions."""
    target = house.service.sessions.targets.named("")
    end = target.info.eos_token_ids[0]
    template = "{% for m in messages %}{{ m['content'] }}<|end|>\n{% endfor %}"
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    messages: Any = [{"role": ("user", "assistant")[at % 2], "content": "Hi."} for at in range(41)]
    more = {"prompt_logprobs": 1, "return_token_ids": True}
    said = await api.chat.completions.create(model="", messages=messages, max_tokens=1, seed=1, extra_body=more)
    assert said.model_extra is not None
    tokens = said.model_extra["prompt_token_ids"]
    assert tokens.count(end) == 41
    with torch.inference_mode():
        wanted = torch.log_softmax(plain_target(torch.tensor([tokens])).logits[0].double(), -1)
    for at, token in enumerate(tokens[1:]):
        told = said.model_extra["prompt_logprobs"][at + 1][str(token)]["logprob"]
        assert told == pytest.approx(wanted[at, token].item(), abs=2e-4), at


async def test_they_are_told_without_an_echo_as_vllm_tells_them(api: AsyncOpenAI, house: House) -> None:
    """Of each prompt of a batch, with each of its choices; and beside the choices of a chat."""
    prompts, more = [TEXT, "One."], {"prompt_logprobs": 2}
    wanted = (await api.completions.create(**ASK | {"prompt": prompts, "logprobs": 2})).choices
    given: dict[str, Any] = {"model": "", "prompt": prompts, "max_tokens": OUTPUT, "n": 2, "temperature": 0}
    plain = await api.completions.create(**given)
    found = await api.completions.create(**given, extra_body=more)
    assert [choice.text for choice in found.choices] == [choice.text for choice in plain.choices]
    assert all(choice.logprobs is None for choice in found.choices)
    target = house.service.sessions.targets.named("")
    for choice in found.choices:
        ids = target.encode(prompts[choice.index // 2])
        echoed = wanted[choice.index // 2].logprobs
        assert echoed is not None
        first, *told = choice.model_extra["prompt_logprobs"]
        assert first is None
        assert len(told) == len(ids) - 1
        for at, (token, entries) in enumerate(zip(ids[1:], told, strict=True), 1):
            assert next(iter(entries)) == str(token), "the prompt's own comes first"
            assert entries[str(token)]["logprob"] == pytest.approx(echoed.token_logprobs[at], abs=1e-6)
            ranks = sorted(entry["rank"] for entry in entries.values() if entry["rank"])
            assert ranks == [1, 2]
            assert all(
                entry["decoded_token"] == target.token_bytes(int(it)).decode(errors="replace")
                for it, entry in entries.items()
            )
            values = [entry["logprob"] for entry in entries.values() if entry["rank"]]
            assert sorted(values, reverse=True) == pytest.approx(
                sorted(echoed.top_logprobs[at].values(), reverse=True)[:2], abs=1e-6
            )
    chat = {"model": "", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
    said = await api.chat.completions.create(**chat, extra_body=more | {"return_token_ids": True})
    assert said.model_extra is not None
    told = said.model_extra["prompt_logprobs"]
    assert [next(iter(entries)) for entries in told[1:]] == [str(it) for it in said.model_extra["prompt_token_ids"][1:]]
    assert "prompt_logprobs" not in said.choices[0].model_extra


async def test_an_echo_has_as_many_as_its_output(api: AsyncOpenAI) -> None:
    given = ASK | {"prompt": TEXT, "logprobs": 1}
    alone = (await api.completions.create(**given)).choices[0]
    both = (await api.completions.create(**given, extra_body={"prompt_logprobs": 4})).choices[0]
    assert both.logprobs == alone.logprobs
    assert {len(entries) for entries in both.model_extra["prompt_logprobs"][1:]} <= {4, 5}


@pytest.mark.parametrize("path", ["responses", "messages"])
async def test_items_and_blocks_do_not_have_them(api: AsyncOpenAI, path: str) -> None:
    body = (
        {"input": "Hi."} if path == "responses" else {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
    )
    with pytest.raises(BadRequestError, match="prompt_logprobs and return_token_ids need a chat or a completion"):
        await api.post(f"/{path}", body=body | {"prompt_logprobs": 1}, cast_to=object)
