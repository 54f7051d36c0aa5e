"""Request bodies: a large one is read beside the event loop, and both kinds are refused alike."""

from __future__ import annotations

import gzip
import json
import re
import threading
import tracemalloc
from typing import Any

import pytest
from pydantic import ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from coordinator.api.http.agents.bodies import ChatBody, DetokenizeBody, TokenizeChatBody
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.bodies import Body, CompletionBody, MarkedBody, read_body
from coordinator.api.http.failures import FIELD_NAMES, body_of, of_validation
from coordinator.api.http.messages.bodies import MessagesBody
from outrider.base.aio import LARGE_BYTES, until
from outrider.protocol.errors import InvalidRequest

SIZES = pytest.mark.parametrize("size", [0, 2 * LARGE_BYTES], ids=["small", "large"])
THREADS: list[int] = []


class Seen(Body):
    text: str
    number: int = 0

    @model_validator(mode="after")
    def _seen(self) -> Seen:
        THREADS.append(threading.get_ident())
        return self


class Other(Body):
    other: str


def request(data: bytes, media: str = "application/json") -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": [(b"content-type", media.encode())]}, receive)


def written(size: int, **more: Any) -> bytes:
    return json.dumps({"text": "x" * size} | more).encode()


@pytest.mark.parametrize(("beyond", "beside"), [(0, False), (1, True)])
async def test_only_a_large_body_is_read_beside_the_loop(beyond: int, beside: bool) -> None:
    THREADS.clear()
    size = LARGE_BYTES + beyond - len(written(0))
    assert (await read_body(request(written(size)), Seen)).text == "x" * size
    assert [thread != threading.get_ident() for thread in THREADS] == [beside]


@SIZES
async def test_a_body_is_the_first_kind_that_has_its_fields(size: int) -> None:
    other = json.dumps({"other": "y" * size}).encode()
    assert isinstance(await read_body(request(written(size)), Other, Seen), Seen)
    assert isinstance(await read_body(request(other), Seen, Other), Other)


@SIZES
@pytest.mark.parametrize(
    ("more", "field"), [({"number": "one"}, "number"), ({"unknown": 1}, "unknown"), ({"text": 5}, "text")]
)
async def test_a_fault_is_named(size: int, more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await read_body(request(written(size, **more) + b" " * size), Seen)
    assert refused.value.field == field


def parts(**part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]}


def items(*given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"input": list(given) or "Hi."} | more


@pytest.mark.parametrize(
    ("kind", "given", "field", "value"),
    [
        (ChatBody, parts(type="image_url", image_url={"url": "x"}), "messages.1.content.1.type", "image_url"),
        (ChatBody, parts(type="input_audio", input_audio={}), "messages.1.content.1.type", "input_audio"),
        (ChatBody, parts(type="refusal", text="No."), "messages.1.content.1.text", ""),
        (ChatBody, parts(image_url={"url": "x"}), "messages.1.content.1.image_url", ""),
        (ChatBody, parts(type="text", text="x", image_url="x"), "messages.1.content.1.image_url", ""),
        (ChatBody, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type", "custom"),
        (ChatBody, {"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type", "custom"),
        (ResponsesBody, items(tools=[{"type": "file_search", "filters": {}}]), "tools.0.type", "file_search"),
        (ResponsesBody, items(tools=[{"type": "local_shell"}]), "tools.0.type", "local_shell"),
        (ResponsesBody, items(tool_choice={"type": "web_search"}), "tool_choice.type", "web_search"),
        (ResponsesBody, items(tools=[{"type": "custom", "name": "f"}]), "tools.0.type", "custom"),
        (ResponsesBody, items({"type": "custom_tool_call", "call_id": "1"}), "input.0.type", "custom_tool_call"),
        (ResponsesBody, items({"role": "user", "phase": "x" * 10, "content": "x", "other": 1}), "input.0.other", ""),
    ],
)
async def test_what_is_of_another_type_is_named_by_that(
    kind: type[Body], given: dict[str, Any], field: str, value: str
) -> None:
    """`there is no field messages.0.content.0.image_url` told clients nothing."""
    asked = {"messages": []} | given if kind is ChatBody else given
    if kind is ChatBody:
        asked["messages"] = [{"role": "user", "content": "Hi."}, *asked["messages"]]
    with pytest.raises(InvalidRequest) as refused:
        await read_body(request(json.dumps(asked).encode()), kind)
    assert (refused.value.field, refused.value.value.strip("'")) == (field, value)


@pytest.mark.parametrize("place", ["status", "summary"])
async def test_what_is_ignored_of_a_response_is_short(place: str) -> None:
    def given(text: str) -> bytes:
        more = {"reasoning": {"summary": text}} if place == "summary" else {}
        said = {"role": "user", "content": "x"} | ({"status": text} if place == "status" else {})
        return json.dumps(items(said, **more)).encode()

    assert await read_body(request(given("x" * 64)), ResponsesBody)
    with pytest.raises(InvalidRequest, match="at most 64 characters") as refused:
        await read_body(request(given("x" * 65)), ResponsesBody)
    assert refused.value.field.endswith(place)


@SIZES
@pytest.mark.parametrize("end", [b"}", b"\xff", b",NaN"])
async def test_what_is_no_json_is_refused(size: int, end: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        await read_body(request(written(size) + end), Seen)


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (b'{"prompt":[' + b"1," * (1 << 20) + b"1,1]}", "1048576 values"),
        (b'{"prompt":[' + b"[]," * (1 << 16) + b"[]]}", "65536 keys, lists and objects"),
        (b'{"prompt":' + b"[" * (1 << 16) + b"]" * (1 << 16) + b"}", "65536 keys, lists and objects"),
        (b'{"prompt":"\\\\",' + b'"a":1,' * (1 << 16) + b'"b":2}', "65536 keys, lists and objects"),
    ],
)
async def test_a_body_that_takes_long_to_parse_is_refused(data: bytes, limit: str) -> None:
    """The parser keeps the interpreter: no stream of another client had a token meanwhile."""
    with pytest.raises(InvalidRequest, match=f"body is more than {limit}, must be at most {limit}"):
        await read_body(request(data), CompletionBody)


@pytest.mark.parametrize(("values", "what"), [("0," * (1 << 16) + "0,0", "values"), ("[]," * (1 << 16) + "[]", "keys")])
async def test_the_arguments_of_a_call_count_though_they_are_a_text(values: str, what: str) -> None:
    """Twelve megabytes of them were four million lists: each of several readings took 0.7 s of all streams."""
    call = {"id": "1", "function": {"name": "f", "arguments": f'{{"all": [{values}]}}'}}
    data = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    with pytest.raises(InvalidRequest, match=f"arguments is more than 65536 {what}"):
        await read_body(request(data), ChatBody)
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": call["function"]["arguments"]}
    with pytest.raises(InvalidRequest, match=f"arguments is more than 65536 {what}"):
        await read_body(request(json.dumps({"input": [item]}).encode()), ResponsesBody)


async def test_a_chat_has_no_million_values() -> None:
    """Templates that write tools with an indent made 800 megabytes of a million numbers in deep lists."""
    tool = b'{"type":"function","function":{"name":"f","parameters":{"enum":[' + b"0," * (1 << 16) + b"0,0]}}}"
    with pytest.raises(InvalidRequest, match="body is more than 65536 values"):
        await read_body(request(b'{"messages":[{"role":"user","content":""}],"tools":[' + tool + b"]}"), ChatBody)


@pytest.mark.parametrize("text", ['[{,:"\\', '\\"[', "\\\\", '"', "[[,,::{{"])
@pytest.mark.parametrize("shift", [0, 1, 2])
async def test_texts_and_long_prompts_have_any_number_of_marks(text: str, shift: int) -> None:
    prompt = "x" * shift + text * (1 << 20)
    assert (await read_body(request(json.dumps({"prompt": prompt}).encode()), CompletionBody)).prompt == prompt


async def test_a_prompt_may_have_a_million_ids() -> None:
    ids = list(range(1_000_000))
    assert (await read_body(request(json.dumps({"prompt": ids}).encode()), CompletionBody)).prompt == ids
    assert (await read_body(request(json.dumps({"tokens": ids}).encode()), DetokenizeBody)).tokens == ids


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ResponsesBody, MessagesBody])
async def test_a_large_body_takes_no_memory_while_its_answer_is_written(kind: type[Body]) -> None:
    """A request lives as long as its stream: five hundred of them with labels of megabytes filled gigabytes."""
    text, many = "x" * 1_000_000, {"a": ["y" * 1000 for _ in range(1_000)]}
    labels: dict[str, Any] = {"user": text, "prompt_cache_key": text, "prompt_cache_options": many}
    given: dict[str, Any] = {"prompt": "Hi."}
    if kind is ChatBody:
        given = {"messages": [{"role": "user", "content": "Hi.", "parsed": many}], "prediction": many}
    elif kind is MessagesBody:
        thought = {"type": "thinking", "thinking": "Hm.", "signature": text}
        call = {"type": "tool_use", "id": "a", "name": "f", "input": {}, "caller": many}
        given = {"messages": [{"role": "assistant", "content": [thought, call]}], "max_tokens": 1, "metadata": many}
    elif kind is ResponsesBody:
        item = {"type": "output_text", "text": "Hi.", "annotations": [many]}
        given = {"input": [{"role": "assistant", "content": [item], "id": text}], "client_metadata": many}
    asked = request(json.dumps({**given, **labels}).encode())
    tracemalloc.start()
    body = await read_body(asked, kind)
    freed = await until(lambda: tracemalloc.get_traced_memory()[0] < 300_000, 2)  # the thread may still have it
    tracemalloc.stop()
    assert asked.state.size > 3_000_000
    assert freed, body


@SIZES
async def test_another_media_type_is_refused(size: int) -> None:
    with pytest.raises(HTTPException) as refused:
        await read_body(request(written(size), "text/plain"), Seen)
    assert refused.value.status_code == 415


@SIZES
async def test_a_compressed_body_is_refused_as_such(size: int) -> None:
    asked = request(gzip.compress(written(size)))
    asked.scope["headers"].append((b"content-encoding", b"GZIP"))
    with pytest.raises(HTTPException, match="Content-Encoding is gzip, must be absent") as refused:
        await read_body(asked, Seen)
    assert refused.value.status_code == 415


@SIZES
async def test_a_field_of_newer_clients_may_be_null(size: int) -> None:
    assert (await read_body(request(written(size, newer=None)), Seen)).text == "x" * size
    with pytest.raises(InvalidRequest, match="newer"):
        await read_body(request(written(size, newer=0)), Seen)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", 1], "prompt.1 is 1: Input should be a valid string"),
        ([1, "a"], "prompt.1 is 'a': Input should be a valid integer"),
        (["a", ""], "prompt.1 is '': String should have at least 1 character"),
        ([[1], "a"], "prompt.1 is 'a': Input should be a valid list"),
        ([[1], []], "prompt.1 is []: List should have at least 1 item"),
    ],
)
async def test_a_fault_is_that_of_the_kind_of_list_that_was_meant(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        await read_body(request(json.dumps({"prompt": prompt}).encode()), CompletionBody)


async def test_a_fault_names_no_class_of_ours() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages\.0 is 5: Input should be a valid dictionary$"):
        await read_body(request(b'{"messages": [5]}'), ChatBody)


async def test_names_of_the_request_before_are_forgotten() -> None:
    """A pipelined request begins within the context of the one before it, which may have been a chat."""
    FIELD_NAMES.set({"prompt": "messages"})
    refused = InvalidRequest.of("prompt", "300 tokens", "at most 256")
    assert body_of(refused)["error"]["param"] == "messages"
    await read_body(request(written(1)), Seen)
    assert body_of(refused)["error"]["param"] == "prompt"


def test_a_call_that_was_cut_keeps_the_arguments_that_are_whole() -> None:
    """Its answer has finish_reason length, which the message does not tell when it is sent back."""
    whole = json.dumps({"path": "a.txt", "rows": [1, -2.5e3, None], "text": "\u00e9\n"})

    def sent_back(arguments: str) -> dict[str, Any]:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = ChatBody.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        values: dict[str, Any] = chat.messages[0].plain["tool_calls"][0]["function"]["arguments"]
        return values

    assert sent_back(whole[: whole.index("rows")]) == {"path": "a.txt"}
    assert all(sent_back(whole[:end]).items() <= json.loads(whole).items() for end in (*range(18), len(whole)))
    assert all(isinstance(sent_back(whole[:end]), dict) for end in range(len(whole)))
    for wrong in ("[1", "x", whole + "}", whole[:9] + "x"):
        with pytest.raises(ValueError, match="must be a JSON object"):
            sent_back(wrong)


def test_what_other_servers_take_and_changes_nothing_is_taken() -> None:
    part = {"type": "text", "text": "Hi.", "prompt_cache_breakpoint": {"mode": "explicit"}}
    said = {"role": "assistant", "content": "So.", "reasoning": "Hm."}  # as vLLM writes it
    said |= {"id": "msg_1", "annotations": [{"type": "url_citation"}], "function_call": None}  # as clients keep it
    cut = {"role": "assistant", "content": None, "reasoning": "Hm."}  # of an answer that ended in its thoughts
    body = {"messages": [{"role": "user", "content": [part]}, said, cut], "top_logprobs": 0, "verbosity": "medium"}
    chat = ChatBody.model_validate(body)
    assert [message.plain for message in chat.messages] == [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
    ]
    assert chat.num_logprobs is None
    item = {"role": "user", "content": [part | {"type": "input_text"}]}
    codex = {"client_metadata": {"x-codex-installation-id": "1"}}
    assert ResponsesBody.model_validate({"input": [item]} | codex).chat.messages[0].plain == {
        "role": "user",
        "content": "Hi.",
    }


DEFAULTS = json.loads("""{
    "skip_special_tokens": true, "spaces_between_special_tokens": true, "include_stop_str_in_output": false,
    "use_beam_search": false, "length_penalty": 1.0, "early_stopping": false, "bad_words": [], "guided_json": null,
    "return_token_ids": false, "return_tokens_as_token_ids": false, "separate_reasoning": true,
    "include_reasoning": true
}""")


@pytest.mark.parametrize("other", [{"skip_special_tokens": False}, {"length_penalty": 0.5}, {"bad_words": ["x"]}])
def test_what_is_the_case_may_be_asked_for(other: dict[str, Any]) -> None:
    """Pages and load generators for vLLM send each of its fields, with its default where nothing is set."""
    completion = {"prompt": "x", "echo": False} | DEFAULTS
    assert CompletionBody.model_validate(completion) == CompletionBody.model_validate({"prompt": "x", "echo": False})
    chat = {"messages": [{"role": "user", "content": "Hi."}]}
    assert ChatBody.model_validate(chat | {"echo": False} | DEFAULTS) == ChatBody.model_validate(chat)
    response = {"input": "Hi.", "top_logprobs": 0, "background": False} | DEFAULTS
    assert ResponsesBody.model_validate(response).chat == ResponsesBody(input="Hi.").chat
    for kind, body in ((CompletionBody, completion), (ChatBody, chat | DEFAULTS)):
        with pytest.raises(ValidationError, match=next(iter(other))):
            kind.model_validate(body | other)


@pytest.mark.parametrize(
    ("name", "equal"),
    [
        ("skip_special_tokens", 1),
        ("skip_special_tokens", 1.0),
        ("use_beam_search", 0),
        ("length_penalty", True),
        ("top_logprobs", False),
    ],
)
def test_a_number_is_no_boolean_where_one_value_is_taken(name: str, equal: Any) -> None:
    """They are equal in Python."""
    assert DEFAULTS.get(name, 0) == equal
    with pytest.raises(ValidationError, match=name):
        CompletionBody.model_validate({"prompt": "x", name: equal})


@pytest.mark.parametrize(
    ("name", "texts"),
    [("skip_special_tokens", ["True", "true"]), ("length_penalty", ["1", "1.0"]), ("bad_words", ["[]"])],
)
def test_a_text_that_reads_like_the_one_value_is_not_it(name: str, texts: list[str]) -> None:
    CompletionBody.model_validate({"prompt": "x", name: DEFAULTS[name]})
    for text in texts:
        with pytest.raises(ValidationError, match=name):
            CompletionBody.model_validate({"prompt": "x", name: text})


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (ChatBody, parts(type="text", text="x", echo=False), "messages.0.content.1.echo"),
        (ChatBody, {"messages": [{"role": "user", "content": "x", "echo": False}]}, "messages.0.echo"),
        (ChatBody, {"messages": [{"role": "user", "content": "x", "safety_identifier": "y"}]}, "safety_identifier"),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}], "annotations": []}, "annotations"),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}], "response_format": {"id": "y"}}, "id"),
        (ResponsesBody, items({"role": "user", "content": "x", "bad_words": []}), "input.0.bad_words"),
        (ResponsesBody, items(stream=True, stream_options={"cache_control": {}}), "stream_options.cache_control"),
        (ResponsesBody, items(text={"phase": "x"}), "text.phase"),
        (DetokenizeBody, {"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens"),
    ],
)
async def test_what_changes_nothing_does_so_only_where_it_belongs(
    kind: type[Body], given: dict[str, Any], field: str
) -> None:
    """Defaults of other servers and labels belong to requests, and marks to what is sent back."""
    with pytest.raises(InvalidRequest, match="there is no field") as refused:
        await read_body(request(json.dumps(given).encode()), kind)
    assert refused.value.field.endswith(field)


def test_refusals_that_are_sent_back_are_text() -> None:
    refusal = {"type": "refusal", "refusal": "I cannot."}
    for part in ("text", "output_text"):
        said = {"role": "assistant", "content": [{"type": part, "text": "So."}, refusal]}
        for body in (
            ChatBody.model_validate({"messages": [said]}),
            ResponsesBody.model_validate({"input": [said]}).chat,
        ):
            assert body.messages[0].plain == {"role": "assistant", "content": "So.\nI cannot."}
    whole = {"role": "assistant", "content": None, "refusal": "I cannot."}  # as OpenAI's client has it
    chat = ChatBody.model_validate({"messages": [whole, whole | {"content": "So."}, whole | {"refusal": None} | SAID]})
    assert [message.plain["content"] for message in chat.messages] == ["I cannot.", "So.\nI cannot.", "So."]
    with pytest.raises(ValidationError, match="those of an assistant"):
        ChatBody.model_validate({"messages": [whole | {"role": "user"}]})


SAID = {"content": "So."}
FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(("mode", "required"), [("auto", False), ("required", True)])
def test_only_allowed_tools_can_be_called_and_all_are_told(mode: str, *, required: bool) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi."}], "tools": FUNCTIONS}
    flat = [{"type": "function", "name": name} for name in ("f", "g", "h")]
    choice = {"type": "allowed_tools", "mode": mode, "tools": flat[::2]}
    response = ResponsesBody.model_validate({"input": "Hi.", "tools": flat, "tool_choice": choice})
    for body in (ChatBody.model_validate(chat | {"tool_choice": allowed(mode, "f", "h")}), response.chat):
        assert body.calls_required is required
        assert [tool.function.name for tool in body.callable_tools] == ["f", "h"]
        assert [tool.function.name for tool in body.tools or ()] == ["f", "g", "h"]
    for wrong in (allowed(mode, "f", "x"), allowed(mode), allowed("none", "f")):
        with pytest.raises(ValidationError, match="tool_choice"):
            ChatBody.model_validate(chat | {"tool_choice": wrong})
    with pytest.raises(ValidationError, match="tool_choice"):
        ChatBody.model_validate(chat | {"tools": None, "tool_choice": allowed(mode, "f")})


def test_offers_of_server_tools_are_left_out() -> None:
    """As Codex sends them. No other tool is left out, nor one that must be called."""
    web = {"type": "web_search", "external_web_access": True, "search_context_size": "low"}
    offers = [web, {"type": "image_generation", "output_format": "png"}, {"type": "web_search_preview"}]
    function = {"type": "function", "name": "f"}
    body = ResponsesBody.model_validate({"input": "Hi.", "tools": [offers[0], function, *offers[1:]]})
    assert [tool.function.name for tool in body.chat.tools or ()] == ["f"]
    assert ResponsesBody.model_validate({"input": "Hi.", "tools": offers, "tool_choice": "auto"}).chat.tools == []
    choices = ("required", {"type": "web_search"}, {"type": "allowed_tools", "mode": "auto", "tools": [web]})
    for choice in choices:
        with pytest.raises(ValidationError, match="tool_choice"):
            ResponsesBody.model_validate({"input": "Hi.", "tools": offers, "tool_choice": choice})


def test_marks_of_other_servers_caches_and_thoughts_change_nothing() -> None:
    """As LiteLLM sends them on with its providers `openai` and `custom_openai`, and as its messages are sent back."""
    mark = {"cache_control": {"type": "ephemeral"}}
    thoughts = {
        "reasoning_content": "Hm.",
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Be short.", **mark}]},
        {"role": "user", "content": "Hi.", **mark},
        {"role": "assistant", "content": "So.", **thoughts, **mark},
    ]
    function = {"name": "f", "parameters": {"type": "object"}}
    chat = ChatBody.model_validate(
        {"messages": messages, "tools": [{"type": "function", "function": function | mark, **mark}]}
    )
    assert [message.plain for message in chat.messages] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
    ]
    assert [tool.function.model_dump(exclude_none=True) for tool in chat.tools or ()] == [function]


def test_text_parts_are_lines_of_their_own() -> None:
    """As vLLM joins them: two results of a tool would become one number."""
    chat, items = ([{"type": kind, "text": text} for text in ("12", "34")] for kind in ("text", "input_text"))
    message = {"role": "tool", "tool_call_id": "a", "content": chat}
    output = {"type": "function_call_output", "call_id": "a", "output": items}
    for body in (
        ChatBody.model_validate({"messages": [message]}),
        ResponsesBody.model_validate({"input": [output]}).chat,
    ):
        assert body.messages[0].plain["content"] == "12\n34"


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_a_message_may_have_no_parts(role: str) -> None:
    """LangChain sends the result of an MCP tool that says nothing as an empty list, in chats and in responses."""
    message = {"role": role, "content": [], **({"tool_call_id": "a"} if role == "tool" else {})}
    item = {"type": "function_call_output", "call_id": "a", "output": []} if role == "tool" else message
    for body in (
        ChatBody.model_validate({"messages": [message]}),
        ResponsesBody.model_validate({"input": [item]}).chat,
    ):
        assert body.messages[0].plain["content"] == ""


@pytest.mark.parametrize("number", [0, 1, 0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (ChatBody, {"messages": [], "structured_outputs": {"json_object": None}}, "structured_outputs.json_object"),
        (TokenizeChatBody, {"messages": [], "add_special_tokens": None}, "add_special_tokens"),
        (ChatBody, {"messages": [], "logprobs": None}, "logprobs"),
        (CompletionBody, {"prompt": "a", "echo": None}, "echo"),
    ],
)
def test_a_number_is_no_flag(kind: type[Body], given: dict[str, Any], field: str, number: float) -> None:
    """In Python, 1 is equal to true and 0 to false: literals took them."""
    body = json.loads(json.dumps(given).replace("null", json.dumps(number)))
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body | ({"messages": [{"role": "user", "content": "Hi."}]} if "messages" in body else {}))
    assert of_validation(caught.value).field == field


def test_what_may_hold_anything_is_not_read() -> None:
    """Twenty megabytes of it took 71 ms: they were written as JSON, to be compared with nothing."""
    MarkedBody.model_validate({"provider_specific_fields": object()})  # which JSON cannot hold
