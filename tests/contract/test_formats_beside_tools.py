"""Tools and a format in one request: every answer is valid calls or a valid final answer, in every dialect."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict

from tests.contract.test_tools import ASK, SCHEMAS, TOOLS, biased, named, streamed

pytestmark = pytest.mark.asyncio(loop_scope="session")

DIALECTS = ("hermes", "llama3", "mistral", "json", "qwen3_coder", "minimax_m2", "kimi_k2")
DAYS: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["get_time", "days"]}, "days": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["name", "days"],
    "additionalProperties": False,
}
REGEX = "(yes|no), [0-9]{2}"
FORMATS: dict[str, dict[str, Any]] = {
    "schema": {"type": "json_schema", "json_schema": {"name": "days", "schema": DAYS}},
    "object": {"type": "json_object"},
    "regex": {"type": "regex", "regex": REGEX},
}
SEEDS = 4
AT_ONCE = 16  # seeds, of three requests each: a coordinator refuses hundreds
# Letters with which calls begin beside a format, or differ from an answer in their name, and those of answers.
OF_CALLS = {"schema": "<[ag", "object": "<[", "regex": "<[{"}
OF_ANSWERS = {"schema": "{dg", "object": "{", "regex": "yn"}


class Days(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sunny: bool


def kind_of(form: str, content: str, calls: list[tuple[str, str]], reason: str) -> str:
    """Check an answer, and return whether it is calls or a final answer; an answer may be cut."""
    for name, arguments in calls if reason != "length" else ():
        jsonschema.validate(json.loads(arguments), SCHEMAS[name] or {"type": "object", "maxProperties": 0})
    if calls:
        assert reason == "length" or (reason, content) == ("tool_calls", ""), "a call that was cut is text"
        return "calls"
    if reason == "length":
        return "cut"
    assert reason == "stop"
    assert content
    if form == "regex":
        assert re.fullmatch(REGEX, content)
    else:
        jsonschema.validate(json.loads(content), DAYS if form == "schema" else {"type": "object"})
    return "answer"


async def valid_for_seeds(api: AsyncOpenAI, form: str, seeds: int) -> None:
    """The target is noise: of four answers one is what it will be, two are calls, for want of other letters."""

    turns = asyncio.Semaphore(AT_ONCE)

    async def kind_for(seed: int) -> str:
        async with turns:
            return await kind_of_answers(seed)

    async def kind_of_answers(seed: int) -> str:
        body = ASK | {"response_format": FORMATS[form], "seed": seed}
        body["max_tokens"] = 1500 if seed % 2 and form != "object" else 100  # of cut calls some are text
        body["parallel_tool_calls"] = seed % 4 > 1
        body |= biased(("", OF_ANSWERS[form], OF_CALLS[form], OF_ANSWERS[form])[seed % 4], -100)
        told = []
        *wholes, (pieces, reason) = await asyncio.gather(
            *(api.chat.completions.create(**body, extra_body={"speculation": {"gamma": gamma}}) for gamma in (4, 0)),
            streamed(api, **body),
        )
        for found in wholes:
            [choice] = found.choices
            calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
            told.append((choice.message.content or "", calls, choice.finish_reason))
        told.append((pieces["content"], [(call["name"], call["arguments"]) for call in pieces["tool_calls"]], reason))
        assert told[0] == told[1] == told[2]
        return kind_of(form, *told[0])

    seen = Counter(await asyncio.gather(*map(kind_for, range(seeds))))
    assert form == "object" or (seen["calls"] and seen["answer"]), seen


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_answer_is_valid_and_the_same_in_every_way(
    apis: dict[str, AsyncOpenAI], dialect: str, form: str
) -> None:
    await valid_for_seeds(apis[dialect], form, SEEDS)


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_hundred_answers_are_valid(apis: dict[str, AsyncOpenAI], dialect: str, form: str) -> None:
    await valid_for_seeds(apis[dialect], form, 100)


@pytest.mark.parametrize("choice", ["required", named("add")], ids=["required", "named"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_call_that_must_be_is_one(apis: dict[str, AsyncOpenAI], dialect: str, choice: Any) -> None:
    body = ASK | {"tool_choice": choice, "seed": 1, "parallel_tool_calls": False}
    plain, *answers = await asyncio.gather(
        *(
            apis[dialect].chat.completions.create(**body, response_format=form)
            for form in ({"type": "text"}, *FORMATS.values())
        )
    )
    [same] = plain.choices[0].message.tool_calls
    for found in answers:
        assert found.choices[0].message.content is None
        [call] = found.choices[0].message.tool_calls
        assert call.function == same.function


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_same_as_a_response(apis: dict[str, AsyncOpenAI], dialect: str) -> None:
    flat: list[Any] = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    given: dict[str, Any] = {"model": "", "input": "Weather?", "tools": flat, "temperature": 1}
    given |= {"text": {"format": {"type": "json_schema", "name": "days", "schema": DAYS}}, "max_output_tokens": 300}

    async def last_event(seed: int) -> Any:
        async with apis[dialect].responses.stream(**given, extra_body={"seed": seed}) as stream:
            *_, last = [event async for event in stream]
        return last

    async def same(seed: int) -> None:
        body = ASK | {"response_format": FORMATS["schema"], "seed": seed}
        answer, found, last = await asyncio.gather(
            apis[dialect].chat.completions.create(**body),
            apis[dialect].responses.create(**given, extra_body={"seed": seed}),
            last_event(seed),
        )
        chat = answer.choices[0].message
        calls = [(item.name, item.arguments) for item in found.output if item.type == "function_call"]
        assert found.output_text == (chat.content or "")
        assert calls == [(call.function.name, call.function.arguments) for call in chat.tool_calls or ()]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == found.output_text

    await asyncio.gather(*map(same, range(SEEDS)))


async def test_the_clients_own_parser(apis: dict[str, AsyncOpenAI]) -> None:
    """OpenAI's client reads what comes into the types that it was given."""
    strict: list[Any] = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": SCHEMAS[name]}}
        for name in ("get_weather", "add")
    ]
    for seed in range(SEEDS):
        message = (
            (
                await apis["hermes"].chat.completions.parse(
                    model="", messages=ASK["messages"], tools=strict, response_format=Days, seed=seed, max_tokens=1800
                )
            )
            .choices[0]
            .message
        )
        assert isinstance(message.parsed, Days) is not bool(message.tool_calls)


async def test_formats_that_are_refused(apis: dict[str, AsyncOpenAI]) -> None:
    fields = {"name": {"type": "string"}, "arguments": {"type": "object"}}
    like_a_call = {"type": "object", "properties": fields, "required": ["name", "arguments"]}
    for dialect, form, refused in (
        ("json", {"type": "json_schema", "json_schema": {"name": "x", "schema": like_a_call}}, True),
        ("hermes", {"type": "json_schema", "json_schema": {"name": "x", "schema": like_a_call}}, False),
        ("hermes", {"type": "regex", "regex": "("}, True),
    ):
        body = ASK | {"response_format": form, "max_tokens": 4}
        if not refused:
            await apis[dialect].chat.completions.create(**body)
            continue
        with pytest.raises(openai.BadRequestError) as caught:
            await apis[dialect].chat.completions.create(**body)
        assert caught.value.param == "tools and response_format", caught.value


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_expression_and_choices_may_have_line_feeds(apis: dict[str, AsyncOpenAI], dialect: str) -> None:
    free = ASK | {"logit_bias": {str(ord("a") - ord("!")): 100}, "seed": 1, "max_tokens": 40}
    for given in (
        {"response_format": {"type": "regex", "regex": "a/b\n\\\nc"}},
        {"structured_outputs": {"choice": ["a/b\n\nc"]}},
    ):
        found = (await apis[dialect].chat.completions.create(**free, extra_body=given)).choices[0].message
        assert found.content == "a/b\n\nc"
