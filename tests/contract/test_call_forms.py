"""Calls in the forms of today's agent models, over real sockets: valid arguments, in pieces too, and sent back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI

from outrider.engine.loading.loader import LoadedModel
from tests.contract.test_tools import ASK, CHAT, NO_END, SCHEMAS, named, streamed

pytestmark = pytest.mark.asyncio(loop_scope="session")

PYTHON = ("lfm2", "olmo3", "pythonic")
DIALECTS = (
    "qwen3_coder",
    "glm47",
    "minimax_m2",
    "deepseek_v32",
    "deepseek_v3",
    "kimi_k2",
    "cohere",
    "nemotron",
    *PYTHON,
)
SEEDS = 6
# The first letter of another call, where the list of calls could end as well.
MORE = {"qwen3_coder": "\n", "glm47": "<", "minimax_m2": "i", "deepseek_v32": "｜", "deepseek_v3": "\n", "kimi_k2": "_"}
MORE |= {"cohere": ",", "nemotron": ",", "lfm2": ",", "olmo3": "\n", "pythonic": ","}
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 5},
        "to": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "lines": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2},
    },
    "required": ["text", "to"],
    "additionalProperties": False,
}
ALL: dict[str, dict[str, Any]] = {**SCHEMAS, "note": NOTE}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": it}} for name, it in ALL.items()]
ONE: dict[str, Any] = ASK | {"tools": TOOLS, "max_tokens": 600, "tool_choice": "required", "parallel_tool_calls": False}


async def asked(api: AsyncOpenAI, gamma: int, **body: Any) -> tuple[str, list[tuple[str, str]], str]:
    """The content of an answer, its calls, and the reason of its end."""
    found = await api.chat.completions.create(**body, extra_body={"speculation": {"gamma": gamma}})
    [choice] = found.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), ALL[name] or {"type": "object", "maxProperties": 0})


@pytest.mark.parametrize("form", DIALECTS)
async def test_calls_are_valid_and_the_same_in_every_way(apis: dict[str, AsyncOpenAI], form: str) -> None:
    choices = (named("note"), "required", named("get_weather"))
    bodies = [ONE | {"tool_choice": choices[seed % 3], "seed": seed} for seed in range(SEEDS)]
    wholes, plains, streams = await asyncio.gather(
        asyncio.gather(*(asked(apis[form], 4, **body) for body in bodies)),
        asyncio.gather(*(asked(apis[form], 0, **body) for body in bodies)),
        asyncio.gather(*(streamed(apis[form], **body) for body in bodies)),
    )
    assert plains == wholes
    drawn = set()
    for whole, (pieces, reason) in zip(wholes, streams, strict=True):
        told = [(call["name"], call["arguments"]) for call in pieces["tool_calls"]]
        assert (pieces["content"], told, reason) == whole
        content, calls, reason = whole
        assert (content, len(calls), reason) == ("", 1, "tool_calls")
        check(calls)
        drawn |= {name for name, _ in calls}
    assert {"note", "get_weather"} <= drawn


@pytest.mark.parametrize("form", DIALECTS)
async def test_several_calls_are_valid(apis: dict[str, AsyncOpenAI], loaded: LoadedModel, form: str) -> None:
    body = ASK | {"tools": TOOLS[:3], "tool_choice": "required", "max_tokens": 600}
    letter = loaded.tokenizer.encode(MORE[form], add_special_tokens=False)[0]
    for seed in range(20):
        body["logit_bias"] = {str(letter): 100 * (seed % 2)}  # every other answer may end after one call
        content, calls, reason = await asked(apis[form], 4, **body, seed=seed)
        assert content == ""
        check(calls if reason == "tool_calls" else calls[:-1])
        if len(calls) > 1:
            return
    pytest.fail("one call in each answer")


@pytest.mark.parametrize("form", DIALECTS)
async def test_a_call_that_is_cut_is_a_beginning_and_can_be_sent_back(apis: dict[str, AsyncOpenAI], form: str) -> None:
    body = ONE | {"tool_choice": named("note"), "seed": 2}
    answer = await apis[form].chat.completions.create(**body)
    [call] = answer.choices[0].message.tool_calls
    whole, most = call.function.arguments, answer.usage.completion_tokens
    lengths = set()
    limits = range(14, most, 3) if form in PYTHON else range(40, min(most, 110), 6)  # whose calls are short
    for content, calls, reason in await asyncio.gather(
        *(asked(apis[form], 4, **body | {"max_tokens": limit}) for limit in limits)
    ):
        assert reason == "length"
        for name, arguments in calls:
            assert name == "note"
            assert whole.startswith(arguments.rstrip("\N{REPLACEMENT CHARACTER}")), "half a character may be its end"
            lengths.add(len(arguments))
            assert not content
    assert len(lengths) > 1
    call = {"id": "a", "type": "function", "function": {"name": "note", "arguments": arguments}}
    said: list[Any] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "."},
    ]
    assert await asked(apis[form], 4, **ONE | {"messages": [*CHAT, *said], "tool_choice": "none", "max_tokens": 4})


@pytest.mark.parametrize("form", DIALECTS)
async def test_text_without_a_call_is_content(apis: dict[str, AsyncOpenAI], form: str) -> None:
    body = ASK | NO_END | {"tools": TOOLS, "seed": 3, "max_tokens": 30}
    content, calls, reason = await asked(apis[form], 4, **body)
    assert content
    assert not calls
    assert await asked(apis[form], 0, **body) == (content, calls, reason)


@pytest.mark.parametrize("form", DIALECTS)
async def test_a_response_has_the_calls_of_its_chat(apis: dict[str, AsyncOpenAI], form: str) -> None:
    flat: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    _, calls, _ = await asked(apis[form], 4, **ONE | {"seed": 1})
    given: dict[str, Any] = {
        "model": "",
        "input": "Weather?",
        "tools": flat,
        "temperature": 1,
        "tool_choice": "required",
    }
    given |= {"parallel_tool_calls": False, "max_output_tokens": 600, "extra_body": {"seed": 1}}
    found = await apis[form].responses.create(**given)
    assert [(item.name, item.arguments) for item in found.output if item.type == "function_call"] == calls
    async with apis[form].responses.stream(**given) as stream:
        events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == calls[0][1]


async def test_a_strict_tool_is_refused_for_what_its_form_cannot_hold(apis: dict[str, AsyncOpenAI]) -> None:
    schema = {"properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
    for form, refused in (("qwen3_coder", True), ("kimi_k2", False)):
        tool = {"type": "function", "function": {"name": "plan", "strict": True, "parameters": schema}}
        body = ONE | {"tools": [tool], "max_tokens": 100}
        if not refused:
            assert (await asked(apis[form], 4, **body))[1]
            continue
        with pytest.raises(openai.BadRequestError, match="plan: format cannot be held") as caught:
            await asked(apis[form], 4, **body)
        assert caught.value.param == "tools"
