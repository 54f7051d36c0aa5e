"""Tools, as OpenAI's client calls them: valid arguments, the same answer in pieces, and an agent that ends."""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

from coordinator.api.http import replies
from coordinator.api.http.agents import manners, response_events
from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.response_bodies import ResponsesBody
from outrider.protocol.errors import InvalidRequest
from tests.contract.conftest import House, slowed

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["celsius", "kelvin"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {"terms": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}},
        "required": ["terms"],
        "additionalProperties": False,
    },
    "get_time": {},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CHAT: list[Any] = [{"role": "user", "content": "Weather?"}]
ASK: dict[str, Any] = {"model": "", "messages": CHAT, "tools": TOOLS, "max_tokens": 300, "temperature": 1}
ONE: dict[str, Any] = ASK | {"tool_choice": "required", "parallel_tool_calls": False}
FEW, MANY = 12, 200


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def api(house: House) -> AsyncIterator[AsyncOpenAI]:
    base = f"http://{house.service.http_address}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def biased(letters: str, by: int) -> dict[str, Any]:
    """Return a request's bias for letters of the toy target's vocabulary, whose noise a bias of 100 outweighs."""
    return {"logit_bias": {str(ord(letter) - ord("!")): by for letter in letters}}


NO_END: dict[str, Any] = {"logit_bias": {"256": -100}}  # of the toy target's answers, where anything else may follow


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def check(message: ChatCompletionMessage, *, calls: int | None = 1) -> list[tuple[str, str]]:
    assert message.content is None
    found = [(call.function.name, call.function.arguments) for call in message.tool_calls or [] if call.function]
    assert found if calls is None else len(found) == calls
    for name, arguments in found:
        schema = SCHEMAS[name] or {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(arguments), schema)
    return found


async def streamed(api: AsyncOpenAI, **body: Any) -> tuple[dict[str, Any], str]:
    """The message that the deltas add up to, and the reason of its end."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = ""
    async for chunk in await api.chat.completions.create(**body, stream=True):
        choice = chunk.choices[0]
        message["content"] += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            if delta.id is not None:
                assert delta.index == len(message["tool_calls"])
                assert delta.function is not None
                message["tool_calls"].append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            assert delta.function is not None
            message["tool_calls"][delta.index]["arguments"] += delta.function.arguments or ""
        reason = choice.finish_reason or reason
    return message, reason


async def valid_for_seeds(api: AsyncOpenAI, count: int) -> None:
    drawn = set()
    for seed in range(count):
        choice = (named("get_weather"), named("add"), "required")[seed % 3]
        body = ONE | {"tool_choice": choice, "seed": seed} | biased(f"{seed % 10}", 100)
        if seed % 6 == 5:  # of the required ones: to get_time
            body |= biased("aw", -100)
        whole = await api.chat.completions.create(**body, extra_body={"speculation": {"gamma": 4}})
        assert whole.choices[0].finish_reason == "tool_calls"
        drawn |= set(check(whole.choices[0].message))
    assert {name for name, _ in drawn} == set(SCHEMAS)
    assert len(drawn) > 5, "arguments differ"


async def test_arguments_are_valid_for_every_seed(api: AsyncOpenAI) -> None:
    await valid_for_seeds(api, FEW)


@pytest.mark.prove
@pytest.mark.timeout(1200)
async def test_arguments_are_valid_for_two_hundred_seeds(api: AsyncOpenAI) -> None:
    await valid_for_seeds(api, MANY)


@pytest.mark.parametrize("choice", ["auto", "required", named("add")], ids=["auto", "required", "named"])
async def test_guesses_and_pieces_change_nothing(api: AsyncOpenAI, choice: Any) -> None:
    for seed in range(3):
        body = ASK | {"tool_choice": choice, "seed": seed, "max_tokens": 60}
        whole = await api.chat.completions.create(**body, extra_body={"speculation": {"gamma": 4}})
        plain = await api.chat.completions.create(**body, extra_body={"speculation": {"gamma": 0}})
        message = whole.choices[0].message
        calls = [call.function for call in message.tool_calls or []]
        assert [call.function for call in plain.choices[0].message.tool_calls or []] == calls
        assert plain.choices[0].message.content == message.content
        pieces, reason = await streamed(api, **body)
        assert pieces["content"] == (message.content or "")
        assert [(call["name"], call["arguments"]) for call in pieces["tool_calls"]] == [
            (call.name, call.arguments) for call in calls
        ]
        assert reason == whole.choices[0].finish_reason


async def test_a_named_tool_is_called_once(api: AsyncOpenAI) -> None:
    for name in SCHEMAS:
        found = await api.chat.completions.create(**ASK, tool_choice=named(name), seed=1)
        assert [called for called, _ in check(found.choices[0].message)] == [name]


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called(api: AsyncOpenAI, mode: str) -> None:
    """The prompt is the same, so its cache serves all choices."""
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named("get_time"), named("add")]},
    }
    drawn = set()
    for seed in range(6):
        found = await api.chat.completions.create(**ASK | {"tool_choice": choice, "max_tokens": 100}, seed=seed)
        free = await api.chat.completions.create(**ASK | {"tool_choice": mode, "max_tokens": 1}, seed=seed)
        assert found.usage is not None
        assert free.usage is not None
        assert found.usage.prompt_tokens == free.usage.prompt_tokens
        drawn |= {call.function.name for call in found.choices[0].message.tool_calls or [] if call.function}
        if mode == "required" and found.choices[0].finish_reason == "tool_calls":
            check(found.choices[0].message, calls=None)
    assert drawn <= {"get_time", "add"}
    assert drawn or mode == "auto"


async def test_the_form_of_calls_is_found_once(api: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with an idempotency key read the chat template twice."""
    found, find = list[str](), manners.dialect_of
    monkeypatch.setattr(manners, "dialect_of", lambda *given: (found.append("it"), find(*given))[1])
    for _ in range(2):
        body = ONE | {"seed": 5, "extra_headers": {"Idempotency-Key": "one-form"}}
        check((await api.chat.completions.create(**body)).choices[0].message)
        assert found == ["it"]
        found.clear()


async def test_without_a_choice_no_tool_is_called(api: AsyncOpenAI) -> None:
    """And the tools are not told of."""
    body: dict[str, Any] = {"model": "", "messages": CHAT, "max_tokens": 20, "seed": 4}
    plain = await api.chat.completions.create(**body)
    none = await api.chat.completions.create(**body, tools=TOOLS, tool_choice="none")
    assert none.choices == plain.choices


@pytest.mark.parametrize("stream", [True, False])
async def test_the_input_of_a_response_is_not_kept_as_long_as_its_answer_takes(
    api: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    kept: list[int] = []

    def look(*_: Any) -> dict[str, Any]:
        gc.collect()
        found = [
            one for one in gc.get_objects() if isinstance(one, ChatBody | ResponsesBody) and one.cache_salt == "mine"
        ]
        kept.append(sum(len(one.input if isinstance(one, ResponsesBody) else one.messages) for one in found))
        return {}

    monkeypatch.setattr(response_events, "metrics", look)  # at the end of the answer
    made = await api.responses.create(
        input="a" * 1_000, max_output_tokens=2, stream=stream, extra_body={"cache_salt": "mine"}
    )
    if stream:
        assert [event async for event in made]
    assert kept == [0]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_is_not_kept_as_long_as_its_answer_takes(
    api: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Its tools, of which a target is told nothing without a choice, may be megabytes for each of many streams."""
    kept: list[int] = []

    def look(*_: Any) -> dict[str, Any]:
        gc.collect()
        bodies = (one for one in gc.get_objects() if isinstance(one, ChatBody) and one.cache_salt == "this one")
        kept.append(sum(len(body.messages) + len(body.tools or ()) for body in bodies))
        return {}

    monkeypatch.setattr(replies, "metrics", look)  # at the end of the answer
    given = ASK | {"tool_choice": "none", "max_tokens": 2, "stream": stream}
    made = await api.chat.completions.create(**given, extra_body={"cache_salt": "this one"})
    if stream:
        assert [chunk async for chunk in made]
    assert kept == [0]


async def test_an_agent_calls_two_tools_and_ends(api: AsyncOpenAI) -> None:
    """What it is told of calls and their results is sent back as it came. Guesses change nothing."""
    transcripts = []
    for gamma in (0, 4):
        messages: list[Any] = [*CHAT]
        said: list[Any] = []
        for turn in (named("get_weather"), named("add"), "none"):
            body = ASK | NO_END | {"messages": messages, "tool_choice": turn, "seed": 1}
            body |= {"max_tokens": 100 if turn != "none" else 10, "extra_body": {"speculation": {"gamma": gamma}}}
            answer = (await api.chat.completions.create(**body)).choices[0].message
            messages.append(answer)
            said.append(answer.content)
            for call in answer.tool_calls or ():
                said.append((call.function.name, call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
            if not answer.tool_calls:
                break
        transcripts.append(said)
    assert transcripts[0] == transcripts[1]
    assert [part[0] for part in said if isinstance(part, tuple)] == ["get_weather", "add"]
    assert said[-1]


async def test_a_streamed_call_can_be_sent_back(api: AsyncOpenAI) -> None:
    function = TOOLS[0]["function"] | {"strict": True}
    asked = ONE | {"tools": [{"type": "function", "function": function}], "seed": 3}
    async with api.chat.completions.stream(**asked) as stream:
        said = (await stream.get_final_completion()).choices[0].message
    [call] = said.tool_calls or ()
    assert call.function.parsed_arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    again = await api.chat.completions.create(model="", messages=[*CHAT, said, result], max_tokens=4)
    assert again.choices


@pytest.mark.parametrize("formatted", [False, True])
async def test_an_error_in_a_stream_names_the_tools(api: AsyncOpenAI, house: House, formatted: bool) -> None:
    body = ASK | NO_END | ({"response_format": {"type": "json_object"}} if formatted else {})
    name = "tools and response_format" if formatted else "tools"
    field = "params.grammar.lark"

    async def read() -> None:
        async for chunk in await api.chat.completions.create(**body, stream=True, seed=3):
            for session in house.service.sessions.live * bool(chunk.choices[0].delta.role):
                session.stop(InvalidRequest(f"{field} failed after 3 tokens: too slow", field=field))

    with slowed(house.loaded, 0.02), pytest.raises(openai.APIError) as caught:
        await read()
    assert (caught.value.param, caught.value.message) == (name, f"{name} failed after 3 tokens: too slow")


LARGE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(6_000)}}
UNKNOWN: dict[str, Any] = {"not": {}}
FOREIGN: dict[str, Any] = {"properties": {"a": {"$ref": "https://example.org/a.json"}}}
LOOKING: dict[str, Any] = {"properties": {"a": {"type": "string", "pattern": "(?!x)"}}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": TOOLS * 50}, "tools"),
        ({"tools": TOOLS[:1] * 2}, "body"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": LARGE}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": UNKNOWN, "strict": True}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": LOOKING, "strict": True}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": FOREIGN}}]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "body"),
        ({"tool_choice": named("nothing")}, "body"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "messages.0",
        ),
    ],
)
async def test_bad_tools_are_refused_by_name(api: AsyncOpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.chat.completions.create(**{key: value for key, value in (ASK | change).items() if value is not None})
    assert (caught.value.param or "").startswith(param), caught.value
    assert len(str(caught.value)) < 2_000
    assert "response_format" not in str(caught.value)
