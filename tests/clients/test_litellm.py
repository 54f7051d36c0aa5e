"""LiteLLM as an agent's client: tools whole and streamed, formats, and an agent that ends."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from openai import OpenAI

from tests.clients.conftest import QUESTION, TOOLS, Weather, called, check

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


def complete(base: str, *, gamma: int = 4, **more: Any) -> Any:
    given = {"messages": MESSAGES, "temperature": 1, "seed": 5, "num_retries": 0, "timeout": 60} | more
    speculation = {"speculation": {"gamma": gamma}}
    return litellm.completion("openai/target", api_base=base, api_key="none", extra_body=speculation, **given)


def calls_of(answer: Any) -> list[tuple[str, str]]:
    calls = answer.choices[0].message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls]


def test_tools_are_called_whole_and_streamed(base: str) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    found = calls_of(complete(base, **asked))
    [(name, arguments)] = found
    check(name, json.loads(arguments))
    assert calls_of(complete(base, **asked, gamma=0)) == found
    chunks = list(complete(base, **asked, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert calls_of(built) == found
    assert built.choices[0].finish_reason == "tool_calls"


def test_formats(base: str) -> None:
    answer = complete(base, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


def test_formats_beside_tools(base: str) -> None:
    kinds = set()
    for seed in range(4):
        asked: dict[str, Any] = {"tools": TOOLS[1:], "response_format": Weather, "max_tokens": 300} | called(base, seed)
        answer, plain = complete(base, **asked), complete(base, **asked, gamma=0)
        assert calls_of(answer) == calls_of(plain)
        assert answer.choices[0].message.content == plain.choices[0].message.content
        for name, arguments in calls_of(answer):
            check(name, json.loads(arguments))
        if not calls_of(answer):
            Weather.model_validate_json(answer.choices[0].message.content)
        kinds.add(bool(calls_of(answer)))
    assert kinds == {True, False}


def test_an_agent_calls_two_tools_and_ends(base: str) -> None:
    said = []
    for gamma in (0, 4):
        messages, called = list(MESSAGES), []
        for turn in ("Weather", "Switch", "none"):
            choice = turn if turn == "none" else {"type": "function", "function": {"name": turn}}
            answer = complete(base, messages=messages, tools=TOOLS, tool_choice=choice, gamma=gamma, max_tokens=200)
            message = answer.choices[0].message
            messages.append(message)
            called += calls_of(answer)
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "Done."})
        assert [name for name, _ in called] == ["Weather", "Switch"]
        said.append((called, message.content))
    assert said[0] == said[1]
    assert said[0][1]


def test_responses(base: str) -> None:
    flat = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    given: dict[str, Any] = {"input": QUESTION, "tools": flat, "tool_choice": "required", "parallel_tool_calls": False}
    found = litellm.responses(
        model="openai/target", api_base=base, api_key="none", extra_body={"seed": 5}, temperature=1, **given
    )
    own = OpenAI(base_url=base, api_key="none").responses.create(model="target", extra_body={"seed": 5}, **given)
    [call] = found.output
    [wanted] = own.output
    assert (call.type, call.name, call.arguments) == ("function_call", wanted.name, wanted.arguments)
    check(call.name, json.loads(call.arguments))


def test_a_refusal_names_the_field(base: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="tool_choice"):
        complete(base, tool_choice="required")


@pytest.mark.parametrize("more", [{}, {"max_tokens": 50}])
def test_a_chat_that_is_too_long_is_known_as_such(base: str, more: dict[str, int]) -> None:
    """Agents then shorten it and go on."""
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(base, messages=[{"role": "user", "content": "again " * 2000}], **more)
