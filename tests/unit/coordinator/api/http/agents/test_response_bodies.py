"""Items of `/v1/responses` as messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import from_json

from coordinator.api.http.agents.bodies import MAX_MESSAGES
from coordinator.api.http.agents.response_bodies import ResponsesBody

USER = {"role": "user", "content": "Hi."}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID: dict[str, Any] = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "So.", "annotations": []}],
}


def call(id_: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}"}


def output(id_: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": [{"type": "input_text", "text": id_}]}


def messages(*items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    body = ResponsesBody.model_validate({"input": list(items)} | more)
    plain = [message.plain for message in body.chat.messages]
    for message in plain:
        if "tool_calls" in message:
            message["tool_calls"] = [each["id"] for each in message["tool_calls"]]
    return plain


def test_instructions_come_first() -> None:
    system = {"role": "system", "content": "Be short."}
    assert messages(USER, instructions="Be short.") == [system, USER]
    assert messages({"role": "developer", "content": "Be short."}, USER) == [system, USER]


def test_the_items_of_an_answer_are_one_message() -> None:
    answer = {"role": "assistant", "reasoning_content": "Hm.", "content": "So.", "tool_calls": ["a", "b"]}
    results = [{"role": "tool", "tool_call_id": id_, "content": id_} for id_ in ("a", "b")]
    assert messages(USER, THOUGHT, SAID, call("a"), call("b"), output("a"), output("b")) == [USER, answer, *results]


@pytest.mark.parametrize(
    ("items", "fields"),
    [
        ([SAID, SAID], [["content"], ["content"]]),
        ([call("a"), SAID], [["content", "tool_calls"], ["content"]]),
        ([SAID, THOUGHT, call("a")], [["content"], ["content", "reasoning_content", "tool_calls"]]),
        ([THOUGHT, THOUGHT, SAID], [["content", "reasoning_content"], ["content", "reasoning_content"]]),
        ([call("a"), output("a"), call("b")], [["content", "tool_calls"], ["content", "tool_calls"]]),
    ],
)
def test_what_cannot_follow_in_one_answer_begins_another(items: list[Any], fields: list[list[str]]) -> None:
    found = [message for message in messages(USER, *items) if message["role"] == "assistant"]
    assert [sorted(message.keys() - {"role"}) for message in found] == fields


def test_items_that_a_client_has_parsed_are_taken() -> None:
    [part] = SAID["content"]
    said = SAID | {"content": [part | {"parsed": {"ok": True}}]}
    assert messages(USER, said, call("a") | {"parsed_arguments": {}}) == messages(USER, SAID, call("a"))


def test_namespaces_have_one_level_and_names_of_their_own() -> None:
    function = {"type": "function", "name": "g" * 64}
    space = {"type": "namespace", "name": "s" * 64, "tools": [function]}
    told = ResponsesBody.model_validate({"input": "Hi.", "tools": [space, function]}).chat.tools or []
    assert [tool.function.name for tool in told] == [f"{'s' * 64}__{'g' * 64}", "g" * 64]
    for tools, reason in (
        ([space | {"tools": [space]}], "tools are functions"),
        ([space, space], "names of their own"),
    ):
        with pytest.raises(ValidationError, match=reason):
            ResponsesBody.model_validate({"input": "Hi.", "tools": tools})


@pytest.mark.parametrize("item", [USER, call("a")], ids=["messages", "calls"])
def test_as_many_items_as_are_taken_may_have_instructions(item: dict[str, Any]) -> None:
    body = ResponsesBody.model_validate({"input": [item] * MAX_MESSAGES, "instructions": "Be short."})
    assert len(body.chat.messages) == (MAX_MESSAGES + 1 if item is USER else 2)
    with pytest.raises(ValidationError) as caught:
        ResponsesBody.model_validate({"input": [item] * (MAX_MESSAGES + 1)})
    assert {error["loc"][0] for error in caught.value.errors()} == {"input"}


LABELS = '{"metadata": {"a": [%s]}}'
TOOL = '{"tools": [{"type": "function", "name": "f", "parameters": {"properties": {"x": {"maximum": %s}}}}]}'
FORMAT = '{"text": {"format": {"type": "json_schema", "name": "x", "schema": {"maximum": %s}}}}'


@pytest.mark.parametrize("given", [LABELS, TOOL, FORMAT], ids=["metadata", "tools", "text"])
def test_numbers_that_the_reply_cannot_repeat_are_refused(given: str) -> None:
    """JSON has no infinity, but numbers that are read as such."""
    assert ResponsesBody.model_validate(from_json(given % "1e300") | {"input": "Hi."})
    for number in ("1e400", "-1e400"):
        with pytest.raises(ValidationError):
            ResponsesBody.model_validate(from_json(given % number, allow_inf_nan=False) | {"input": "Hi."})


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_formats_without_a_schema_are_those_of_a_chat(kind: str) -> None:
    """The first is OpenAI's default, and what answers say of themselves."""
    chat = ResponsesBody.model_validate({"input": "x", "text": {"format": {"type": kind}}}).chat
    assert chat.response_format is not None
    assert (chat.response_format.type, chat.response_format.json_schema) == (kind, None)
