"""`return_token_ids`, as trainers ask vLLM for the tokens of prompt and output: whole and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.contract.conftest import House
from tests.contract.test_tools import CHAT, TOOLS, api

__all__ = ["api"]

pytestmark = pytest.mark.asyncio(loop_scope="session")

IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True, "speculation": {"gamma": 4}}}
ASK: dict[str, Any] = {"model": "", "max_tokens": 40, "temperature": 1, "seed": 3, "n": 2}


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "required"}, {"logprobs": True}])
async def test_a_chat_has_those_of_its_prompt_and_of_each_choice(
    api: AsyncOpenAI, house: House, more: dict[str, Any]
) -> None:
    """Also where tokens have no text of their own, as marks of calls and ends."""
    target = house.service.sessions.targets.named("")
    whole: Any = await api.chat.completions.create(messages=CHAT, **ASK, **more, **IDS)
    plain = await api.chat.completions.create(messages=CHAT, **ASK, **more)
    assert "token_ids" not in plain.model_dump_json()
    counted: Any = await api.post("/../tokenize", body={"messages": CHAT, "tools": more.get("tools")}, cast_to=object)
    assert whole.prompt_token_ids == counted["tokens"]
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    if not more.get("tools"):
        assert [target.decode(each.token_ids) for each in whole.choices] == [it.message.content for it in plain.choices]
    parts: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    async for chunk in await api.chat.completions.create(messages=CHAT, **ASK, **more, **IDS, stream=True):
        prompts.append(getattr(chunk, "prompt_token_ids", None))
        for choice in chunk.choices:
            assert not hasattr(choice, "prompt_token_ids")
            parts[choice.index] += getattr(choice, "token_ids", None) or []
    assert prompts == [counted["tokens"], *[None] * (len(prompts) - 1)]
    assert parts == {choice.index: choice.token_ids for choice in whole.choices}


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "logprobs": 1}])
async def test_each_choice_of_a_completion_has_those_of_its_prompt(
    api: AsyncOpenAI, house: House, more: dict[str, Any]
) -> None:
    target = house.service.sessions.targets.named("")
    texts = ["One", "Two heads"]
    whole: Any = await api.completions.create(prompt=texts, **ASK, **more, **IDS)
    assert [choice.prompt_token_ids for choice in whole.choices] == [
        list(target.encode(text)) for text in texts for _ in range(2)
    ]
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    for choice in whole.choices:
        text = texts[choice.index // 2] * bool(more) + target.decode(choice.token_ids)
        assert choice.text == text
    parts: dict[int, list[int]] = {number: [] for number in range(4)}
    prompts: dict[int, list[list[int]]] = {number: [] for number in range(4)}
    async for chunk in await api.completions.create(prompt=texts, **ASK, **more, **IDS, stream=True):
        for one in chunk.choices:
            parts[one.index] += getattr(one, "token_ids", None) or []
            prompts[one.index] += [ids] if (ids := getattr(one, "prompt_token_ids", None)) else []
    assert parts == {choice.index: choice.token_ids for choice in whole.choices}
    assert prompts == {choice.index: [choice.prompt_token_ids] for choice in whole.choices}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_alone_has_those_of_the_prompt(api: AsyncOpenAI, house: House, stream: bool) -> None:
    body = ASK | {"prompt": "One", "echo": True, "n": 1, "max_tokens": 0, "stream": stream} | IDS
    made: Any = await api.completions.create(**body)
    choices = [it for chunk in [each async for each in made] for it in chunk.choices] if stream else made.choices
    prompts = [ids for it in choices if (ids := getattr(it, "prompt_token_ids", None))]
    assert prompts == [list(house.service.sessions.targets.named("").encode("One"))]
    assert not any(getattr(it, "token_ids", None) for it in choices)


async def test_a_response_has_none(api: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="return_token_ids"):
        await api.responses.create(model="", input="Hi.", **IDS)
