"""`/v1/responses` as OpenAI's client calls it: whole, streamed and parsed, and the same answers as chats have."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from coordinator.api.http import replies as http_replies
from coordinator.api.http.agents import response_events, truncation
from coordinator.api.http.agents.response_events import ModelResponse, ModelResponseEvent
from outrider.protocol.errors import InvalidRequest, Unavailable
from tests.contract.conftest import House, slowed
from tests.contract.test_tools import SCHEMAS, TOOLS, api

__all__ = ["api"]

pytestmark = pytest.mark.asyncio(loop_scope="session")

FLAT: list[Any] = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
ASK: dict[str, Any] = {"model": "", "input": "Weather?", "max_output_tokens": 20, "temperature": 1}
OPENAI_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SEED: dict[str, Any] = {"extra_body": {"seed": 3}}
TO_THE_END: dict[str, Any] = {"extra_body": {"seed": 3, "ignore_eos": True}}
CALLS: dict[str, Any] = ASK | {"tools": FLAT, "tool_choice": "required", "max_output_tokens": 300}
ONE: dict[str, Any] = CALLS | {"parallel_tool_calls": False}
LOGPROBS: Any = "message.output_text.logprobs"


def calls_of(response: Response) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


async def events_of(house: House, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream as they are on the wire; each names its type twice."""
    url = f"http://{house.service.http_address}/v1/responses"
    async with httpx.AsyncClient(timeout=60) as web, web.stream("POST", url, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {event['type']}" for event in data]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    for event in data:
        TypeAdapter(ModelResponseEvent).validate_python(event, strict=True)
        OPENAI_EVENT.validate_python(event)
    return data


def without_times(response: Any) -> dict[str, Any]:
    """What two answers to the same request have in common."""
    plain = json.loads(json.dumps(response))
    session = plain["id"].removeprefix("resp_")
    plain = json.loads(json.dumps(plain).replace(session, "ID"))
    for item in plain["output"]:
        item.pop("call_id", None)
    return {name: value for name, value in plain.items() if name not in ("created_at", "metrics", "usage")}


async def test_a_text_is_what_a_chat_says(api: AsyncOpenAI) -> None:
    found = await api.responses.create(**ASK, instructions="Be short.", **TO_THE_END)
    messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Weather?"}]
    chat = await api.chat.completions.create(model="", messages=messages, max_tokens=20, **TO_THE_END)
    assert found.output_text == chat.choices[0].message.content
    assert (found.status, found.incomplete_details and found.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert found.usage is not None
    assert chat.usage is not None
    assert found.usage.total_tokens == chat.usage.total_tokens
    assert found.usage.output_tokens == 20
    assert found.output[0].status == "incomplete"
    assert found.instructions == "Be short."


async def test_a_call_that_was_cut_can_be_sent_back(api: AsyncOpenAI) -> None:
    long = {"type": "object", "properties": {"text": {"type": "string", "minLength": 500}}, "required": ["text"]}
    tool: Any = {"type": "function", "name": "write", "parameters": long, "strict": True}
    asked = {**ASK, "tools": [tool], "tool_choice": "required", "max_output_tokens": 40}
    answer = await api.responses.create(**asked)
    [call] = answer.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It was cut."}
    items: list[Any] = [{"role": "user", "content": "Write."}, call, output]
    further = await api.responses.create(**{**ASK, "input": items})
    assert further.output
    # LangGraph's agents send a streamed call back without its id and status.
    bare = {name: getattr(call, name) for name in ("type", "call_id", "name", "arguments")}
    for sent in (bare, {**bare, "status": "completed"}):
        again = await api.responses.create(**{**ASK, "input": [items[0], sent, output], **SEED})
        assert again.usage is not None
        assert further.usage is not None
        assert again.usage.input_tokens == further.usage.input_tokens
    called = {"id": call.call_id, "type": "function", "function": {"name": "write", "arguments": call.arguments}}
    result = {"role": "tool", "tool_call_id": call.call_id, "content": "It was cut."}
    chat = [items[0], {"role": "assistant", "tool_calls": [called]}, result]
    same = await api.chat.completions.create(model="", messages=chat, max_tokens=20, temperature=1, **SEED)
    assert again.output_text == same.choices[0].message.content
    for wrong in ("[1", '{"text": 1}x'):
        with pytest.raises(openai.BadRequestError, match="must be a JSON object"):
            await api.responses.create(**{**ASK, "input": [items[0], {**bare, "arguments": wrong}, output]})


async def test_a_complete_call_at_the_limit_keeps_its_arguments(api: AsyncOpenAI) -> None:
    asked = {**ONE, "extra_body": {"seed": 3}}
    whole = await api.responses.create(**asked)
    assert whole.usage is not None
    limit = whole.usage.output_tokens - 1  # the last one ends the call
    limited = await api.responses.create(**{**asked, "max_output_tokens": limit})
    assert (whole.status, limited.status) == ("completed", "incomplete")
    assert calls_of(limited) == calls_of(whole)
    assert [item.status for item in limited.output] == ["completed"]


async def test_a_text_in_events(house: House) -> None:
    body = ASK | {"seed": 3, "ignore_eos": True}
    events = await events_of(house, body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    added, part, *middle, done, part_done, item_done, last = events[2:]
    text = "".join(event["delta"] for event in middle)
    assert added["item"]["content"] == []
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert done["text"] == part_done["part"]["text"] == item_done["item"]["content"][0]["text"] == text
    assert len({event["item_id"] for event in [part, *middle, done, part_done]} | {added["item"]["id"]}) == 1
    async with httpx.AsyncClient(timeout=60) as web:
        whole = (await web.post(f"http://{house.service.http_address}/v1/responses", json=body)).json()
    TypeAdapter(ModelResponse).validate_python(whole, strict=True)
    assert without_times(whole) == without_times(last["response"])
    assert whole["metrics"]["outrider"]["seed"] == 3


async def test_calls_are_valid_and_the_same_in_events_and_without_guesses(api: AsyncOpenAI) -> None:
    for seed in range(3):
        answers = []
        for gamma in (0, 4):
            more = {"seed": seed, "speculation": {"gamma": gamma}}
            answers.append(await api.responses.create(**ONE, extra_body=more))
            async with api.responses.stream(**ONE, extra_body=more) as stream:
                events = [event async for event in stream]
            answers.append(events[-1].response)
        found = calls_of(answers[0])
        assert len(found) == 1
        assert all(calls_of(answer) == found for answer in answers)
        assert {answer.status for answer in answers} == {"completed"}
        [(name, arguments)] = found
        jsonschema.validate(json.loads(arguments), SCHEMAS[name] or {"type": "object", "maxProperties": 0})
        kinds = [event.type.removeprefix("response.") for event in events]
        deltas = kinds.count("function_call_arguments.delta")
        assert kinds == [
            *("created", "in_progress", "output_item.added"),
            *["function_call_arguments.delta"] * deltas,
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
        assert "".join(event.delta for event in events[3 : 3 + deltas]) == events[-3].arguments == arguments


async def test_a_named_tool_is_called_once(api: AsyncOpenAI) -> None:
    found = await api.responses.create(**CALLS | {"tool_choice": {"type": "function", "name": "add"}}, **SEED)
    assert [name for name, _ in calls_of(found)] == ["add"]
    assert found.tools[0].type == "function"
    assert found.parallel_tool_calls


async def test_only_allowed_functions_are_called(api: AsyncOpenAI) -> None:
    allowed = [{"type": "function", "name": name} for name in ("get_time", "add")]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    drawn = set()
    for seed in range(6):
        found = await api.responses.create(**CALLS | {"tool_choice": choice}, extra_body={"seed": seed})
        drawn |= {name for name, _ in calls_of(found)}
    assert drawn
    assert drawn <= {"get_time", "add"}
    assert found.tool_choice.model_dump(exclude_none=True) == choice  # type: ignore[union-attr]
    assert len(found.tools) == len(FLAT)


async def test_an_offered_web_search_changes_nothing(api: AsyncOpenAI) -> None:
    """Codex sends it with each request. The response names the tools that the target is told of."""
    offers: list[Any] = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    found = await api.responses.create(**ONE | {"tools": [offers[0], *FLAT, offers[1]]}, **SEED)
    plain = await api.responses.create(**ONE, **SEED)
    assert calls_of(found) == calls_of(plain) != []
    assert found.usage is not None
    assert plain.usage is not None
    assert found.usage.input_tokens == plain.usage.input_tokens
    assert found.tools == plain.tools


async def test_a_refusal_is_sent_back_as_text(api: AsyncOpenAI) -> None:
    refused: Any = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
    refused["content"] = [{"type": "refusal", "refusal": "I cannot."}]
    items: list[Any] = [{"role": "user", "content": "Weather?"}, refused, {"role": "user", "content": "Why?"}]
    found = await api.responses.create(**ASK | {"input": items}, **SEED)
    messages: list[Any] = [items[0], {"role": "assistant", "content": "I cannot."}, items[2]]
    for said in (messages[1], {"role": "assistant", "content": None, "refusal": "I cannot."}):
        chat = [messages[0], said, messages[2]]
        same = await api.chat.completions.create(model="", messages=chat, max_tokens=20, temperature=1, **SEED)
        assert found.output_text == same.choices[0].message.content


class Weather(BaseModel):
    sunny: bool
    wind: bool


async def test_a_parsed_format(api: AsyncOpenAI) -> None:
    found = await api.responses.parse(model="", input="Weather?", text_format=Weather, max_output_tokens=100, **SEED)
    assert isinstance(found.output_parsed, Weather)
    async with api.responses.stream(model="", input="Weather?", text_format=Weather, **SEED) as stream:
        async for event in stream:
            if event.type == "response.output_text.done":
                assert event.parsed == found.output_parsed
        assert (await stream.get_final_response()).output_parsed == found.output_parsed


async def test_an_agent_calls_two_tools_and_ends(api: AsyncOpenAI) -> None:
    """Its items are sent back as they came, and the prompt is that of the same chat."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    called = []
    for turn in ("get_weather", "add", "none"):
        choice = "none" if turn == "none" else {"type": "function", "name": turn}
        body = CALLS | {"input": items, "tool_choice": choice, "max_output_tokens": 10 if turn == "none" else 100}
        answer = await api.responses.create(**body, **SEED)
        items += answer.output
        for item in answer.output:
            if item.type == "function_call":
                called.append(item.name)
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."})
                function = {"name": item.name, "arguments": item.arguments}
                messages += [
                    {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
                    {"role": "tool", "tool_call_id": "a", "content": "Sunny."},
                ]
        if not calls_of(answer):
            break
    assert called == ["get_weather", "add"]
    chat = await api.chat.completions.create(model="", messages=messages, max_tokens=10, **SEED)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.output_text


async def test_a_call_of_a_namespace_has_both_names(api: AsyncOpenAI, house: House) -> None:
    """As Codex has the tools of its agents and of MCP servers. The target is told of one name, as by vLLM."""
    weather, *others = FLAT
    space = {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [weather]}
    named = {"type": "function", "name": "mcp__sky__get_weather"}
    body = CALLS | {"tools": [*others, space], "tool_choice": named, "seed": 3}
    *_, last = events = await events_of(house, body)
    [call] = last["response"]["output"]
    assert (call["namespace"], call["name"]) == ("mcp__sky", "get_weather")
    assert {event["item"]["namespace"] for event in events if "item" in event} == {"mcp__sky"}
    assert last["response"]["tools"][-1]["tools"][0]["name"] == "get_weather"
    flat = [*others, weather | {"name": named["name"]}]
    [same] = (await api.responses.create(**CALLS | {"tools": flat, "tool_choice": named}, **SEED)).output
    assert (same.type, same.arguments) == ("function_call", call["arguments"])
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}
    told = []
    for item in (call, same.model_dump() | {"call_id": call["call_id"]}):
        items: list[Any] = [{"role": "user", "content": "Weather?"}, item, output]
        told.append(await api.responses.create(**ASK | {"input": items}, **SEED))
    assert told[0].output_text == told[1].output_text
    assert (told[0].usage and told[0].usage.input_tokens) == (told[1].usage and told[1].usage.input_tokens)


async def test_a_stream_that_fails_says_so(api: AsyncOpenAI, house: House) -> None:
    more = {"seed": 3, "ignore_eos": True}
    events = []
    async for event in await api.responses.create(**ASK | {"max_output_tokens": 1_500}, stream=True, extra_body=more):
        events.append(event)
        if len(events) == 9:
            id_ = events[0].response.id.removeprefix("resp_")
            [session] = [each for each in house.service.sessions.live if each.record.session_id == id_]
            session.stop(Unavailable("no more of it"))
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert (events[-1].response.error.code, events[-1].response.error.message) == ("unavailable", "no more of it")
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_what_exceeds_the_context_has_the_code_that_agents_know(api: AsyncOpenAI) -> None:
    text = "a" * 3_000
    chat = api.chat.completions.create(model="", messages=[{"role": "user", "content": text}])
    for asked, field in ((chat, "messages"), (api.responses.create(model="", input=text), "input")):
        with pytest.raises(openai.BadRequestError, match=f"{field} is [0-9]+ tokens") as caught:
            await asked
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)


async def test_a_stream_that_fails_names_the_field_of_its_request(api: AsyncOpenAI, house: House) -> None:
    long = {"type": "object", "properties": {"text": {"type": "string", "minLength": 300}}, "required": ["text"]}
    form: Any = {"format": {"type": "json_schema", "name": "long", "schema": long}}  # any object may be {}
    field = "params.grammar.json_schema"
    with slowed(house.loaded, 0.02):
        async for event in await api.responses.create(**ASK | {"max_output_tokens": 300}, text=form, stream=True):
            if event.type == "response.created":
                id_ = event.response.id.removeprefix("resp_")
                [session] = [each for each in house.service.sessions.live if each.record.session_id == id_]
                session.stop(InvalidRequest(f"{field} failed after 3 tokens: too slow", field=field))
    assert event.type == "response.failed"
    assert event.response.error.message == "text.format failed after 3 tokens: too slow"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"store": True}, "store", "nothing is stored"),
        ({"top_logprobs": 2}, "body", "top_logprobs needs logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "less than or equal to 20"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"background": True}, "background", "nothing is stored"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}, "tools.0.type", "'file_search'"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "'web_search'",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "body", "tool_choice required needs tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type", "'mcp'"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "mcp"}]}]}, "tools.0.tools.0.type", "'mcp'"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools.0", "required with type namespace"),
        ({"tools": [{**FLAT[0], "tools": [FLAT[1]]}]}, "tools.0", "only there"),
        ({"tools": [{**FLAT[0], "parameters": {"not": {}}}], "tool_choice": "required"}, "tools", "tools"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "x"}}, "body", "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}, "strict": True}}},
            "text.format",
            "text.format",
        ),
        ({"text": {"verbosity": "none"}}, "text.verbosity", "'medium'"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'high'"),
        ({"input": []}, "input", "input"),
        ({"input": "a" * 3_000}, "input", "context"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type", "'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
            "'input_image'",
        ),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]}, "input.0", "arguments"),
        ({"max_output_tokens": 5_000}, "max_output_tokens", "context"),
        ({"extra_body": {"n": 2}}, "n", "Input should be 1"),
        ({"extra_body": {"n": True}}, "n", "Input should be 1"),
        ({"extra_body": {"return_token_ids": 0}}, "return_token_ids", "valid boolean"),
        ({"extra_body": {"speculation": {"show": True}}}, "body", "speculation.show"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    api: AsyncOpenAI, change: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.responses.create(**(ASK | change))
    assert caught.value.param == param
    assert words in caught.value.body["message"]  # type: ignore[index]


async def test_log_probabilities_are_those_of_the_chat(api: AsyncOpenAI) -> None:
    """In events each delta has those of its text, and all that repeat the text have all of them."""
    asked: dict[str, Any] = {**ASK, "input": "Weather? 世界", "include": [LOGPROBS], "top_logprobs": 2, **TO_THE_END}
    whole = await api.responses.create(**asked)
    messages: list[Any] = [{"role": "user", "content": asked["input"]}]
    more: dict[str, Any] = {"max_tokens": 20, "temperature": 1, "logprobs": True, "top_logprobs": 2, **TO_THE_END}
    chat = (await api.chat.completions.create(model="", messages=messages, **more)).choices[0].logprobs
    assert chat is not None
    assert chat.content
    wanted = [token.model_dump() for token in chat.content]
    message: Any = whole.output[0]
    assert [token.model_dump() for token in message.content[0].logprobs] == wanted
    assert whole.top_logprobs == 2
    async with api.responses.stream(
        **{name: it for name, it in asked.items() if name != "top_logprobs"}, top_logprobs=2
    ) as stream:
        events: list[Any] = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    told = [token for event in deltas for token in event.logprobs]
    assert [token.token for token in told] == [token["token"] for token in wanted]
    texts = [(event.delta, "".join(token.token for token in event.logprobs)) for event in deltas]
    assert all(text == of_tokens for text, of_tokens in texts if "\ufffd" not in of_tokens and "<|" not in of_tokens)
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [token.model_dump()["logprob"] for token in done.logprobs] == [token["logprob"] for token in wanted]
    [part] = [event.part for event in events if event.type == "response.content_part.done"]
    [item] = [event.item for event in events if event.type == "response.output_item.done"]
    last: Any = events[-1].response.output[0]
    for repeated in (part, item.content[0], last.content[0]):
        assert [token.model_dump() for token in repeated.logprobs] == wanted


async def test_log_probabilities_are_told_where_they_are_asked_for(api: AsyncOpenAI) -> None:
    plain: Any = (await api.responses.create(**ASK, **SEED)).output[0]
    asked: Any = (await api.responses.create(**ASK, include=[LOGPROBS], **SEED)).output[0]
    assert plain.content[0].logprobs == []
    assert plain.content[0].text == asked.content[0].text
    assert {len(token.top_logprobs) for token in asked.content[0].logprobs} == {0}
    called = await api.responses.create(**ONE, include=[LOGPROBS], **SEED)
    assert [item.type for item in called.output] == ["function_call"]
    assert "logprobs" not in called.output[0].to_dict()


async def test_the_oldest_items_are_left_out_for_the_context(api: AsyncOpenAI) -> None:
    """Whole turns of them, with calls and their outputs; the text is that of the items that are left."""
    items: list[Any] = []
    for number in range(12):
        items += [{"role": "user", "content": f"Turn {number}: " + "a" * 100}]
        items += [{"type": "function_call", "call_id": f"c{number}", "name": "add", "arguments": "{}"}]
        items += [{"type": "function_call_output", "call_id": f"c{number}", "output": "b" * 100}]
        items += [{"role": "assistant", "content": "Fine."}]
    items += [{"role": "user", "content": "And now?"}]
    asked: dict[str, Any] = {**ASK, "instructions": "Be short.", "tools": FLAT, "tool_choice": "none", **SEED}
    with pytest.raises(openai.BadRequestError, match="context"):
        await api.responses.create(**{**asked, "input": items, "truncation": "disabled"})
    found = await api.responses.create(**{**asked, "input": items, "truncation": "auto"})
    assert found.truncation == "auto"
    assert found.instructions == "Be short."
    left, refused = [], set[str | None]()
    for turn in range(12):
        left = items[4 * turn :]
        try:
            same = await api.responses.create(**{**asked, "input": left})
        except openai.BadRequestError as error:
            refused.add(error.code)
            continue
        if same.usage.input_tokens + 20 <= 2048:
            break
    assert refused == {"context_length_exceeded"}
    assert 0 < turn < 12
    assert found.usage.input_tokens == same.usage.input_tokens
    assert found.output_text == same.output_text
    fits = await api.responses.create(**{**asked, "input": left, "truncation": "auto"})
    assert fits.usage.input_tokens == same.usage.input_tokens, "nothing is left out without need"
    with pytest.raises(openai.BadRequestError, match="context"):
        await api.responses.create(**{**asked, "input": "a" * 3_000, "truncation": "auto"})


async def test_other_requests_do_not_wait_for_what_fits(api: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several encodings of a chat, also one of a few KiB, take what a stream's clients would see."""
    threads, search = list[threading.Thread](), truncation.bisect_left

    def noted(*given: Any, **more: Any) -> Any:
        threads.append(threading.current_thread())
        return search(*given, **more)

    monkeypatch.setattr(truncation, "bisect_left", noted)
    items: list[Any] = [{"role": "user", "content": "a" * 100} for _ in range(30)]
    found = await api.responses.create(**{**ASK, "input": items, "truncation": "auto", "max_output_tokens": 4})
    assert found.usage is not None
    assert found.usage.input_tokens < 2048
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_slow_first_token_is_waited_for_with_comments(
    api: AsyncOpenAI, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would take the stream for broken; clients of OpenAI pass over them."""
    for module in (response_events, http_replies):
        monkeypatch.setattr(module, "SILENCE_S", 0.05)
    base = f"http://{house.service.http_address}/v1"
    few = ASK | {"max_output_tokens": 3}
    bodies = {"responses": few, "chat/completions": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}}
    with slowed(house.loaded, 0.5):
        for path, body in bodies.items():
            async with httpx.AsyncClient(timeout=60) as web:
                reply = await web.post(f"{base}/{path}", json=body | {"stream": True})
                lines = [line for line in reply.text.splitlines() if line]
                assert lines[0] == ": ping"
                assert (lines[-1] == "data: [DONE]") == (path != "responses")
                late = await web.post(
                    f"{base}/{path}", json=body | {"stream": True}, headers={"X-Request-Timeout": "9"}
                )
                assert ": ping" not in late.text.partition("data:")[0], "it may still get a status"
        events = [event async for event in await api.responses.create(**few, stream=True)]
        assert events[0].type == "response.created"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        chunks = [
            chunk
            async for chunk in await api.chat.completions.create(
                model="", **bodies["chat/completions"], stream=True, extra_body={"ignore_eos": True}
            )
        ]
        assert chunks[-1].choices[0].finish_reason == "length"
