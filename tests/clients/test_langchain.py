"""LangChain's chat model: tools, structured output by every method, and an agent, over chats and responses."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.clients.conftest import QUESTION, TOOLS, Weather, called, check

STRICT_SWITCH: dict[str, Any] = {"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}


def model(base: str, *, gamma: int | None = None, **more: Any) -> ChatOpenAI:
    """Equal requests have equal seeds, and so equal answers."""
    body = {"seed": 5, "speculation": {} if gamma is None else {"gamma": gamma}} | more.pop("extra_body", {})
    given = {"model": "target", "temperature": 1.0, "max_retries": 0, "timeout": 60} | more
    return ChatOpenAI(base_url=base, api_key="none", extra_body=body, **given)


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def responses(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("choice", ["required", "Switch"])
def test_bound_tools_are_called(base: str, responses: bool, choice: str) -> None:
    bound = model(base, use_responses_api=responses).bind_tools(TOOLS, tool_choice=choice, parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls
    check(call["name"], call["args"])
    assert not answer.invalid_tool_calls
    assert choice in ("required", call["name"])
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    whole, *parts = bound.stream(QUESTION)
    assert len(parts) > 2
    for part in parts:
        whole += part
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [(call["name"], call["args"])]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(base: str, responses: bool, method: Any) -> None:
    found = []
    for gamma in (0, 4):
        structured = model(base, gamma=gamma, use_responses_api=responses).with_structured_output(
            Weather, method=method
        )
        found.append(structured.invoke(QUESTION))
    assert isinstance(found[0], Weather)
    assert found[0] == found[1]


def test_structured_output_beside_tools(base: str, responses: bool) -> None:
    """Each answer is calls or the wanted structure; a final answer that was parsed is of its type."""
    kinds = set()
    for seed in range(4):
        found = []
        for gamma in (0, 4):
            asked = model(base, gamma=gamma, extra_body=called(base, seed), use_responses_api=responses, max_tokens=300)
            both = asked.with_structured_output(
                Weather, method="json_schema", tools=[STRICT_SWITCH], strict=True, include_raw=True
            )
            found.append(both.invoke(QUESTION))
            assert found[-1]["parsing_error"] is None
        calls = [(call["name"], call["args"]) for call in found[0]["raw"].tool_calls]
        assert calls == [(call["name"], call["args"]) for call in found[1]["raw"].tool_calls]
        assert found[0]["parsed"] == found[1]["parsed"]
        assert isinstance(found[0]["parsed"], Weather) is not bool(calls)
        for name, args in calls:
            check(name, args)
        kinds.add(bool(calls))
    assert kinds == {True, False}


def test_json_mode(base: str) -> None:
    """It asks for any object, and the wanted shape is the prompt's: a model of noise answers with another."""
    structured = model(base, max_tokens=400).with_structured_output(Weather, method="json_mode", include_raw=True)
    raw = structured.invoke("Answer in JSON.")["raw"]
    assert raw.content.lstrip().startswith("{")


def conversation(base: str, responses: bool, gamma: int) -> list[Any]:
    """What an agent of two tools says and calls."""
    messages: list[BaseMessage] = [HumanMessage(QUESTION)]
    said: list[Any] = []
    for choice in ("Weather", "Switch", "none"):
        asked = model(base, gamma=gamma, use_responses_api=responses, max_tokens=200)
        answer = asked.bind_tools(TOOLS, tool_choice=choice).invoke(messages)
        messages.append(answer)
        said += [answer.text, *((call["name"], call["args"]) for call in answer.tool_calls)]
        messages += [ToolMessage("Done.", tool_call_id=call["id"]) for call in answer.tool_calls]
        if not answer.tool_calls:
            break
    assert isinstance(messages[-1], AIMessage)
    assert messages[-1].text
    return said


def test_an_agent_calls_two_tools_and_ends(base: str, responses: bool) -> None:
    said = conversation(base, responses, 0)
    assert [part[0] for part in said if isinstance(part, tuple)] == ["Weather", "Switch"]
    assert conversation(base, responses, 4) == said
