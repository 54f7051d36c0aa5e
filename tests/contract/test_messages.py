"""`/v1/messages` as clients of Anthropic's API call it: whole and streamed, and the same answers as chats have."""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
import pytest_asyncio
from pydantic import TypeAdapter

from coordinator.api.http.messages import replies
from coordinator.api.http.messages.bodies import MessagesBody
from coordinator.api.http.messages.types import ModelMessage, ModelMessageEvent
from coordinator.api.http.responses import Error
from outrider.protocol.errors import Unavailable
from tests.contract.conftest import House, slowed
from tests.contract.test_tools import SCHEMAS

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]
PATH = "/v1/messages"
TURN = {"role": "user", "content": "Weather?"}
ASK: Json = {"messages": [TURN], "max_tokens": 20, "temperature": 1, "seed": 3}
TOOLS: list[Json] = [
    {"name": name, "description": "Does it.", "input_schema": schema or {"type": "object", "maxProperties": 0}}
    for name, schema in SCHEMAS.items()
]
ONE: Json = ASK | {"tools": TOOLS, "max_tokens": 300}
ONE["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def web(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{house.service.http_address}", timeout=60) as made:
        yield made


async def ask(web: httpx.AsyncClient, body: Json, path: str = PATH, **headers: str) -> Json:
    reply = await web.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    if path == PATH:
        TypeAdapter(ModelMessage).validate_python(reply.json(), strict=True)
    assert reply.headers.get("request-id") == (reply.headers["x-request-id"] if path.startswith(PATH) else None)
    found: Json = reply.json()
    return found


async def events_of(web: httpx.AsyncClient, body: Json) -> list[Json]:
    """The events of a stream as they are on the wire; each names its type twice."""
    async with web.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {event['type']}" for event in data]
    for event in data:
        TypeAdapter(ModelMessageEvent).validate_python(event, strict=True)
    return data


def added(events: list[Json]) -> Json:
    """The message that the events of a stream add up to, as Anthropic's clients read them."""
    start, *events = events
    message: Json = start["message"]
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif kind == "delta":
            delta, block = event["delta"], message["content"][event["index"]]
            field = {"input_json_delta": "partial_json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            block["json" if field == "partial_json" else field] += delta[field]
        elif kind == "stop":
            block = message["content"][event["index"]]
            arguments = block.pop("json")
            block |= {"input": json.loads(arguments)} if block["type"] == "tool_use" else {}
        elif kind == "message_delta":
            message |= event["delta"] | {name: event[name] for name in ("usage", "metrics")}
    return message


def same(message: Json) -> Json:
    """What two answers to the same request have in common."""
    plain: Json = json.loads(json.dumps(message).replace(message["id"].removeprefix("msg_"), "ID"))
    for block in plain["content"]:
        block.pop("id", None)
    return {name: value for name, value in plain.items() if name not in ("metrics", "usage")}


async def chat(web: httpx.AsyncClient, messages: list[Json], **more: Any) -> Json:
    body = {"messages": messages, "max_tokens": 20, "temperature": 1, "seed": 3} | more
    return await ask(web, body, "/v1/chat/completions")


async def test_a_text_is_what_a_chat_says(web: httpx.AsyncClient) -> None:
    label = "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"
    system = [{"type": "text", "text": text} for text in (label, "Be short.", "And kind.")]
    marked = {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]}
    given: Json = {"metadata": {"user_id": "me"}, "service_tier": "auto", "speed": "standard"}
    found = await ask(
        web, ASK | given | {"system": system, "messages": [marked]}, **{"anthropic-version": "2023-06-01"}
    )
    told = [{"role": "system", "content": "Be short.\nAnd kind."}, TURN]
    answer = await chat(web, told)
    assert found["content"] == [{"type": "text", "text": answer["choices"][0]["message"]["content"]}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage, wanted = found["usage"], answer["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert (read, usage["output_tokens"]) == (wanted["prompt_tokens"], wanted["completion_tokens"])
    counted = await ask(web, {"system": system, "messages": [marked]}, f"{PATH}/count_tokens")
    assert counted == {"input_tokens": wanted["prompt_tokens"]}
    assert found["metrics"]["outrider"]["seed"] == 3
    again = await ask(web, ASK | {"system": system, "messages": [marked]})
    assert again["usage"]["cache_read_input_tokens"] > 0
    assert same(again) == same(found)


async def test_a_text_in_events(web: httpx.AsyncClient) -> None:
    body = ASK | {"ignore_eos": True}
    events = await events_of(web, body)
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_delta") > 1
    assert [kind for kind in kinds if kind != "content_block_delta"] == [
        *("message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert (events[0]["message"]["stop_reason"], events[0]["message"]["content"]) == (None, [])
    assert same(added(events)) == same(await ask(web, body))


async def test_a_stop_sequence_is_told(web: httpx.AsyncClient) -> None:
    whole = (await ask(web, ASK | {"ignore_eos": True}))["content"][0]["text"]
    stop = next(char for char in whole[3:] if char not in whole[:3])
    body = ASK | {"ignore_eos": True, "stop_sequences": ["\0never", stop]}
    found = await ask(web, body)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == whole[: whole.index(stop)]
    assert same(added(await events_of(web, body))) == same(found)


async def test_an_answer_that_the_context_ends_says_so(web: httpx.AsyncClient) -> None:
    long = ASK | {"messages": [{"role": "user", "content": "a" * 2_000}], "ignore_eos": True, "max_tokens": 500}
    found = await ask(web, long)
    assert found["stop_reason"] == "model_context_window_exceeded"
    assert 0 < found["usage"]["output_tokens"] < 500


async def test_calls_are_valid_and_the_same_in_events_and_without_guesses(web: httpx.AsyncClient) -> None:
    for seed in range(3):
        answers = []
        for gamma in (0, 4):
            body = ONE | {"seed": seed, "speculation": {"gamma": gamma}}
            answers += [await ask(web, body), added(await events_of(web, body))]
        assert all(same(answer) == same(answers[0]) for answer in answers)
        [call] = answers[0]["content"]
        assert (call["type"], answers[0]["stop_reason"]) == ("tool_use", "tool_use")
        jsonschema.validate(call["input"], SCHEMAS[call["name"]] or {"type": "object", "maxProperties": 0})
    named = await ask(web, ONE | {"tool_choice": {"type": "tool", "name": "add"}})
    assert [block["name"] for block in named["content"]] == ["add"]
    text = await ask(web, ONE | {"tool_choice": {"type": "none"}, "max_tokens": 5})
    assert [block["type"] for block in text["content"]] == ["text"]


async def test_an_agent_calls_two_tools_and_ends(web: httpx.AsyncClient) -> None:
    """Its blocks are sent back as they came, and the prompt is that of the same chat."""
    turns: list[Json] = [TURN]
    messages: list[Json] = [TURN]
    for name in ("get_weather", "add"):
        answer = await ask(web, ONE | {"messages": turns, "tool_choice": {"type": "tool", "name": name}})
        [call] = answer["content"]
        assert call["name"] == name
        result: Json = {"type": "tool_result", "tool_use_id": call["id"], "content": "Rain.", "is_error": name == "add"}
        turns += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        function = {"name": name, "arguments": json.dumps(call["input"])}
        called = [{"id": call["id"], "type": "function", "function": function}]
        told = "Error:\nRain." if name == "add" else "Rain."
        messages += [
            {"role": "assistant", "tool_calls": called},
            {"role": "tool", "tool_call_id": call["id"], "content": told},
        ]
    turns[-1]["content"].append({"type": "text", "text": "So?"})
    messages.append({"role": "user", "content": "So?"})
    last = await ask(web, ASK | {"messages": turns})
    wanted = await chat(web, messages)
    assert last["content"] == [{"type": "text", "text": wanted["choices"][0]["message"]["content"]}]
    assert wanted["choices"][0]["message"]["content"]


async def test_a_call_that_was_cut_can_be_sent_back(web: httpx.AsyncClient) -> None:
    long = {"type": "object", "properties": {"text": {"type": "string", "minLength": 500}}, "required": ["text"]}
    tools = [{"name": "write", "input_schema": long}]
    body = ASK | {"tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 40}
    found = await ask(web, body)
    [call] = found["content"]
    assert (found["stop_reason"], call["name"], call["input"]) == ("max_tokens", "write", {})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "It was cut."}]}
    turns = [TURN, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert (await ask(web, ASK | {"messages": turns}))["content"]


async def test_the_last_turn_of_an_assistant_is_continued(web: httpx.AsyncClient) -> None:
    begun = {"role": "assistant", "content": "The best"}
    found = await ask(web, ASK | {"messages": [TURN, begun]})
    wanted = await chat(web, [TURN, begun], add_generation_prompt=False, continue_final_message=True)
    assert found["content"][0]["text"] == wanted["choices"][0]["message"]["content"]


async def test_a_format(web: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    schema["additionalProperties"] = False
    body = ASK | {"max_tokens": 100, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    jsonschema.validate(json.loads((await ask(web, body))["content"][0]["text"]), schema)


async def test_a_key_generates_once(web: httpx.AsyncClient) -> None:
    body = {name: value for name, value in ASK.items() if name != "seed"}
    first, again = [await ask(web, body, **{"Idempotency-Key": "messages-1"}) for _ in range(2)]
    assert first["id"] == again["id"]
    assert first["content"] == again["content"]


async def test_a_stream_that_fails_says_so(house: House, web: httpx.AsyncClient) -> None:
    body = ASK | {"max_tokens": 1_500, "ignore_eos": True, "stream": True}
    events: list[Json] = []
    async with web.stream("POST", PATH, json=body, headers={"x-request-id": "r-1"}) as response:
        async for line in response.aiter_lines():
            events += [json.loads(line.removeprefix("data: "))] if line.startswith("data: ") else []
            if len(events) == 9 and line:
                id_ = events[0]["message"]["id"].removeprefix("msg_")
                for session in house.service.sessions.live:
                    if session.record.session_id == id_:
                        session.stop(Unavailable("no more of it"))
    error = {"type": "overloaded_error", "message": "no more of it", "param": None, "code": "unavailable"}
    assert events[-1] == {"type": "error", "error": error, "request_id": "r-1"}


async def test_a_slow_first_token_is_waited_for_with_pings(
    house: House, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claude Code gives up a stream of which nothing arrives for minutes. What is refused has a status all the same."""
    monkeypatch.setattr(replies, "SILENCE_S", 0.05)
    with slowed(house.loaded, 0.5):
        events = await events_of(web, ASK | {"max_tokens": 2})
        kinds = [event["type"] for event in events]
        begun = kinds.index("message_start")
        assert begun > 3
        assert set(kinds[:begun]) == {"ping"}
        assert kinds[-1] == "message_stop"
        assert "ping" not in kinds[begun + 2 :], "a timer for each token would slow all down"
        refused = await web.post(PATH, json=ASK | {"stream": True, "model": "x"})
        assert refused.status_code == 404


async def test_an_error_after_pings_is_an_event(
    house: House, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "SILENCE_S", 0.05)
    with slowed(house.loaded, 1.0):
        async with web.stream("POST", PATH, json=ASK | {"stream": True}) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == "event: ping"
            for session in house.service.sessions.live:
                session.stop(Unavailable("no more of it"))
            told = [line async for line in lines if line.startswith("data: ")]
    assert json.loads(told[-1].removeprefix("data: "))["error"]["type"] == "overloaded_error"
    assert "[DONE]" not in told[-1]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type", "'web_search_20250305'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type", "'image'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
            "messages.0.content.0.type",
            "'input_text': Input should be 'text' or 'tool_result'",
        ),
        ({"system": [{"type": "input_text", "text": "a"}]}, "system.0.type", "'input_text': Input should be 'text'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages.0.content.0.type",
            "'document'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages.0",
            "text and tool_result",
        ),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "at least 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 5_000}, "max_tokens", "context"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "name is required with type tool"),
        ({"tool_choice": {"type": "any"}}, "body", "tool_choice any needs tools"),
        ({"tools": [{"name": "f", "input_schema": {"not": {}}, "strict": True}]}, "tools", "tools"),
        ({"mcp_servers": []}, "mcp_servers", "mcp_servers"),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management.edits.0.type",
            "compact",
        ),
        ({"stop": ["a"]}, "stop", "stop"),
        ({"n": 2}, "n", "Input should be 1"),
        ({"n": True}, "n", "Input should be 1"),
        ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1 character"),
        ({"speculation": {"show": True}}, "body", "speculation.show"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    web: httpx.AsyncClient, change: Json, param: str, words: str
) -> None:
    reply = await web.post(PATH, json=ASK | change)
    told = reply.json()
    TypeAdapter(Error).validate_python(told, strict=True)
    assert (reply.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert (told["error"]["param"], told["request_id"]) == (param, reply.headers["request-id"])
    assert words in told["error"]["message"]


async def test_what_exceeds_the_context_is_told_in_the_words_that_agents_know(web: httpx.AsyncClient) -> None:
    for path in (PATH, "/v1/chat/completions"):
        reply = await web.post(path, json=ASK | {"messages": [{"role": "user", "content": "a" * 3_000}]})
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert message.startswith("prompt is too long: messages is " if path == PATH else "messages is ")


@pytest.mark.parametrize(
    ("path", "more", "headers", "status", "kind"),
    [
        (PATH, {"model": "x"}, {}, 404, "not_found_error"),
        (f"{PATH}/count_tokens", {"model": "x"}, {}, 404, "not_found_error"),
        (f"{PATH}/batches", {}, {}, 404, "not_found_error"),
        (PATH, {}, {"content-type": "text/plain"}, 415, "invalid_request_error"),
        (PATH, {}, {"origin": "http://elsewhere.example"}, 403, "permission_error"),
        (PATH, {}, {"x-request-timeout": "-1"}, 400, "invalid_request_error"),
        (PATH, {}, {"x-request-timeout": "0.000001"}, 504, "timeout_error"),
        (PATH, {"messages": [{"role": "user", "content": "a" * 13_000_000}]}, {}, 413, "request_too_large"),
    ],
)
async def test_errors_have_the_shape_and_the_type_of_these_routes(
    web: httpx.AsyncClient, path: str, more: Json, headers: dict[str, str], status: int, kind: str
) -> None:
    body = {"messages": [TURN]} | (ASK if path == PATH else {}) | more
    reply = await web.post(path, content=json.dumps(body), headers={"content-type": "application/json"} | headers)
    told = reply.json()
    assert (reply.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert ("retry-after" in reply.headers) == (status == 504)
    plain = await web.get("/v1/nothing")
    assert set(plain.json()) == {"error"}
    assert "request-id" not in plain.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_a_body_is_not_kept_as_long_as_its_answer_takes(
    web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    kept: list[int] = []

    def look(*_: Any) -> Json:
        gc.collect()
        bodies = (one for one in gc.get_objects() if isinstance(one, MessagesBody) and one.cache_salt == "mine")
        kept.append(len(list(bodies)))
        return {"metrics": {}}

    monkeypatch.setattr(replies, "metrics", look)  # at the end of the answer
    reply = await web.post(PATH, json=ASK | {"max_tokens": 2, "cache_salt": "mine", "stream": stream})
    assert reply.status_code == 200
    assert kept == [0]
