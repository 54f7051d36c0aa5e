"""Anthropic's client: messages whole and streamed, tools and their runner, formats, counted tokens, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message

from tests.clients.conftest import QUESTION, TOOLS, Weather, check

USER: list[Any] = [{"role": "user", "content": QUESTION}]
CUSTOM: list[Any] = [
    {"name": it["name"], "description": it["description"], "input_schema": it["parameters"]}
    for it in (tool["function"] for tool in TOOLS)
]
ASK: dict[str, Any] = {"model": "target", "messages": USER, "max_tokens": 300}


def seeded(gamma: int = 4) -> dict[str, Any]:
    """Options beside those of the client, which knows no sampling parameters any more."""
    return {"extra_body": {"seed": 5, "temperature": 1, "speculation": {"gamma": gamma}}}


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=base.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="function")
async def later(base: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=base.removesuffix("/v1"), auth_token="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_message_whole_and_streamed(client: Anthropic) -> None:
    whole = client.messages.create(**ASK | {"max_tokens": 20}, system="Be short.", **seeded())
    assert whole.content[0].type == "text"
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole._request_id
    with client.messages.stream(**ASK | {"max_tokens": 20}, system="Be short.", **seeded(0)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model="target", messages=USER, system="Be short.")
    used = final.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


async def test_a_message_of_the_asynchronous_client(later: AsyncAnthropic) -> None:
    kinds = []
    async with later.messages.stream(**ASK | {"max_tokens": 20}, **seeded()) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()
    whole = await later.messages.create(**ASK | {"max_tokens": 20}, **seeded())
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.content[0].text == whole.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Switch"}])
def test_tools_are_called_whole_and_streamed(client: Anthropic, choice: dict[str, Any]) -> None:
    given: dict[str, Any] = ASK | {"tools": CUSTOM, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    whole = client.messages.create(**given, **seeded())
    [(name, arguments)] = calls_of(whole)
    check(name, arguments)
    assert whole.stop_reason == "tool_use"
    assert choice.get("name", name) == name
    with client.messages.stream(**given, **seeded(0)) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(parts) > 2
    assert json.loads("".join(parts)) == arguments
    assert calls_of(final) == [(name, arguments)]


def test_an_agent_calls_two_tools_and_ends(client: Anthropic) -> None:
    said = []
    for gamma in (0, 4):
        turns, called = list(USER), []
        for turn in ("Weather", "Switch", "none"):
            choice: Any = {"type": "none"} if turn == "none" else {"type": "tool", "name": turn}
            answer = client.messages.create(
                **ASK | {"messages": turns, "tools": CUSTOM, "tool_choice": choice}, **seeded(gamma)
            )
            called += calls_of(answer)
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "Done."}]}
                for block in answer.content
                if block.type == "tool_use"
            ]
            turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        assert [name for name, _ in called] == ["Weather", "Switch"]
        said.append((called, answer.content[0].text))
    assert said[0] == said[1]
    assert said[0][1]


def test_a_parsed_format(client: Anthropic) -> None:
    found = client.messages.parse(**ASK, output_format=Weather, **seeded())
    assert isinstance(found.parsed_output, Weather)
    assert client.messages.parse(**ASK, output_format=Weather, **seeded(0)).parsed_output == found.parsed_output


def test_beta_messages(client: Anthropic) -> None:
    """As Claude Code calls them."""
    whole = client.messages.create(**ASK | {"max_tokens": 20}, thinking={"type": "adaptive"}, **seeded())
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    beta = client.beta.messages.create(
        **ASK | {"max_tokens": 20, "betas": ["context-management-2025-06-27"], "context_management": edits},
        thinking={"type": "adaptive"},
        **seeded(),
    )
    assert [block.model_dump() for block in beta.content] == [block.model_dump() for block in whole.content]


def test_errors_are_of_the_kinds_that_the_client_knows(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**ASK | {"model": "x"})
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305") as refused:
        client.messages.create(**ASK, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**ASK | {"messages": [{"role": "user", "content": "again " * 2000}]})
    with pytest.raises(anthropic.GatewayTimeoutError):
        client.messages.create(**ASK, extra_headers={"X-Request-Timeout": "0.000001"})
