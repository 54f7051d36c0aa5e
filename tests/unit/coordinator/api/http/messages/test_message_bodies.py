"""Turns of Anthropic's API as messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.api.http.agents.bodies import MAX_MESSAGES, MAX_PARTS, ChatBody
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.failures import of_validation
from coordinator.api.http.messages.bodies import CountTokensBody, MessagesBody

USER = {"role": "user", "content": "Hi."}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
SAID = {"type": "text", "text": "So."}
OFF = {"enable_thinking": False, "thinking": False, "reasoning": False}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def call(id_: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": "f", "input": given}


def result(id_: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": [{"type": "text", "text": id_}]} | more


def chat(*turns: dict[str, Any], **more: Any) -> ChatBody:
    return MessagesBody.model_validate({"messages": list(turns) or [USER], "max_tokens": 5} | more).chat


def messages(*turns: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    plain = [message.plain for message in chat(*turns, **more).messages]
    for message in plain:
        if "tool_calls" in message:
            message["tool_calls"] = [(each["id"], each["function"]["arguments"]) for each in message["tool_calls"]]
    return plain


def test_the_system_comes_first_and_labels_of_claude_code_do_not() -> None:
    system = {"role": "system", "content": "Be short."}
    label = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.fb9; cc_entrypoint=cli;"}
    assert messages(system="Be short.") == [system, USER]
    assert messages(system=[label, {"type": "text", "text": "Be short."}]) == [system, USER]
    assert messages(system=[label]) == [USER]
    said = {"role": "user", "content": label["text"]}
    assert messages(said) == [said], "only there it is none of the chat"


def test_the_blocks_of_an_answer_are_one_message() -> None:
    hidden = {"type": "redacted_thinking", "data": "x"}
    answer = {"role": "assistant", "content": [THOUGHT, hidden, SAID, call("a", n=1), call("b")]}
    results = {"role": "user", "content": [result("a"), result("b", is_error=True), {"type": "text", "text": "Go on."}]}
    assert messages(USER, answer, results) == [
        USER,
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": [("a", {"n": 1}), ("b", {})]},
        {"role": "tool", "content": "a", "tool_call_id": "a"},
        {"role": "tool", "content": "Error:\nb", "tool_call_id": "b"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("content", "told"), [("Yes.", "Yes."), (None, ""), ([], ""), ([SAID, {"type": "text", "text": "2"}], "So.\n2")]
)
def test_a_result_has_a_text_or_none(content: Any, told: str) -> None:
    turns = (USER, {"role": "assistant", "content": [call("a")]}, {"role": "user", "content": [result("a")]})
    turns[-1]["content"][0]["content"] = content
    assert messages(*turns)[-1] == {"role": "tool", "content": told, "tool_call_id": "a"}


def test_turns_of_one_role_are_one_message() -> None:
    later = {"role": "system", "content": "Agents: none."}
    assert messages(USER, USER) == [{"role": "user", "content": "Hi.\nHi."}]
    assert messages(USER, later, USER) == [USER, later, USER]
    said = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert messages(USER, *said, USER)[1] == {"role": "assistant", "content": "a\nb"}


def test_the_last_turn_of_an_assistant_is_continued() -> None:
    continued = chat(USER, {"role": "assistant", "content": "The"})
    assert (continued.add_generation_prompt, continued.continue_final_message) == (False, True)
    assert chat(USER).add_generation_prompt


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        ({}, None, None),
        ({"tool_choice": {"type": "auto"}}, "auto", True),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, "required", False),
        ({"tool_choice": {"type": "none"}}, "none", True),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "f", True),
    ],
)
def test_tools_and_their_choice(given: dict[str, Any], choice: str | None, parallel: bool | None) -> None:
    found = chat(tools=[TOOL | {"cache_control": {"type": "ephemeral"}}], **given)
    named: Any = found.tool_choice
    assert (named if named is None or isinstance(named, str) else named.function.name) == choice
    assert found.parallel_tool_calls is parallel
    assert found.tools is not None
    assert found.tools[0].function.parameters == TOOL["input_schema"]
    assert found.tools[0].function.model_dump(exclude_none=True, exclude={"strict", "type"}) == {
        "name": "f",
        "parameters": TOOL["input_schema"],
    }


def test_names_of_tools_are_as_long_as_anthropic_has_them() -> None:
    name = "mcp__" + "n" * 123
    answer = {"role": "assistant", "content": [call("a") | {"name": name}]}
    found = chat(USER, answer, {"role": "user", "content": [result("a")]}, tools=[TOOL | {"name": name}])
    assert [tool.function.name for tool in found.callable_tools] == [name]
    assert found.messages[1].plain["tool_calls"][0]["function"]["name"] == name
    with pytest.raises(ValidationError, match="String should match pattern"):
        chat(tools=[TOOL | {"name": name + "n"}])


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({}, OFF),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, dict.fromkeys(OFF, True)),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, dict.fromkeys(OFF, True)),
        ({"output_config": {"effort": "high"}}, OFF | {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"thinking": True}}, OFF | {"thinking": True}),
    ],
)
def test_thinking_is_a_switch_of_the_chat_template(given: dict[str, Any], variables: dict[str, Any]) -> None:
    assert chat(**given).variables == variables


def test_what_is_asked_for_is_asked_of_the_chat() -> None:
    schema = {"type": "object", "properties": {}}
    given: dict[str, Any] = {"stop_sequences": ["a"], "top_k": 5, "temperature": 0.5, "priority": 1, "stream": True}
    form = {"format": {"type": "json_schema", "schema": schema}}
    found = chat(output_config=form, context_management={"edits": [{"type": "clear_thinking_20251015"}]}, **given)
    assert (found.stop, found.top_k, found.temperature, found.priority) == (["a"], 5, 0.5, 1)
    assert (found.stream, found.limit) == (True, 5)
    assert found.response_format is not None
    assert found.response_format.json_schema is not None
    assert found.response_format.json_schema.schema_ == schema


def test_tokens_are_counted_of_what_a_message_has() -> None:
    body = {"messages": [USER], "system": "Be short.", "tools": [TOOL], "thinking": {"type": "adaptive"}}
    counted = CountTokensBody.model_validate(body).chat
    asked = MessagesBody.model_validate(body | {"max_tokens": 5}).chat
    same = {"messages", "tools", "chat_template_kwargs"}
    assert counted.model_dump(include=same) == asked.model_dump(include=same)
    with pytest.raises(ValidationError, match="max_tokens"):
        CountTokensBody.model_validate(body | {"max_tokens": 5})


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": [THOUGHT]},
        {"role": "user", "content": [call("a")]},
        {"role": "assistant", "content": [result("a")]},
        {"role": "system", "content": [result("a")]},
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "citations": [{}]}]},
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [SAID] * (MAX_PARTS + 1)},
    ],
)
def test_what_no_turn_has_is_refused(turn: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(turn)


def test_turns_are_limited() -> None:
    with pytest.raises(ValidationError, match="at most"):
        chat(*[USER] * (MAX_MESSAGES + 1))


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a"}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"messages": [{"role": "user", "content": [SAID, IMAGE]}]}, "'text' or 'tool_result'"),
        ({"messages": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, "'text' or 'tool_result'"),
        ({"messages": [USER, {"role": "system", "content": [IMAGE]}, USER]}, "'text'"),
        (
            {"messages": [USER, {"role": "assistant", "content": [IMAGE]}]},
            "'text' or 'thinking' or 'redacted_thinking' or 'tool_use'",
        ),
        ({"messages": [{"role": "user", "content": [result("a", content=[IMAGE])]}]}, "'text'"),
        ({"system": [{"type": "output_text", "text": "a"}]}, "'text'"),
    ],
)
def test_the_types_that_blocks_may_have_are_told(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        chat(**change)
    assert of_validation(refused.value).message.endswith(f": Input should be {told}")


@pytest.mark.parametrize("body", [CountTokensBody, MessagesBody])
def test_a_choice_without_tools_is_refused_in_the_words_of_messages(body: type[CountTokensBody]) -> None:
    given = {"messages": [USER], "tool_choice": {"type": "any"}} | ({"max_tokens": 5} if body is MessagesBody else {})
    with pytest.raises(ValidationError, match="tool_choice any needs tools"):
        body.model_validate(given)


@pytest.mark.parametrize("one", [True, False, 2, "1"])
def test_only_the_number_1_is_1(one: Any) -> None:
    assert chat(n=1).choices == ResponsesBody.model_validate({"input": "Hi.", "n": 1.0}).chat.choices == 1
    for refused in (lambda: chat(n=one), lambda: ResponsesBody.model_validate({"input": "Hi.", "n": one})):
        with pytest.raises(ValidationError, match="Input should be 1"):
            refused()
