"""A gpt-oss of random weights as agents use it, in processes of its own: thoughts, calls and formats in harmony.

Its answers are noise, held by grammars alone. Biases make it likely that messages begin and end, and that a final one
is not the first. The model adds little to them, so that its weights and the processor's arithmetic do not decide.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.cluster import Cluster, speculation_counters
from tests.contract.test_tools import CHAT, SCHEMAS, TOOLS, named
from tests.harmony import harmony_tokenizer, make_gpt_oss

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

TOKENIZER = harmony_tokenizer()
KNOWN = TOKENIZER.get_vocab()
LIKELY = {"<|end|>": 4, "<|return|>": 5, "<|message|>": 2, "<|channel|>": 2, "Ġ": -0.5, "f": -2}
BIAS = {str(KNOWN[token]): bias for token, bias in LIKELY.items()}
ASK: dict[str, Any] = {"model": "", "messages": CHAT, "max_tokens": 3000, "temperature": 1, "logit_bias": BIAS}
CALLS: dict[str, Any] = ASK | {"tools": TOOLS, "tool_choice": "required"}
FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMAS["get_weather"], "strict": True},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    target = make_gpt_oss(tmp_path_factory.mktemp("gpt-oss"), sharpness=0.1)
    fleet = Cluster(tmp_path_factory.mktemp("fleet"))
    fleet.add_coordinator()
    fleet.add_verifier(target)
    fleet.add_drafter("ngram", None, "--target", str(target))
    fleet.start()
    yield fleet
    fleet.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def api(fleet: Cluster) -> AsyncIterator[AsyncOpenAI]:
    base = f"{fleet.coordinators[0].web}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=100) as made:
        yield made


Said = tuple[str, str, list[tuple[str, str]], str]  # reasoning, content, calls, reason of the end


async def whole(api: AsyncOpenAI, gamma: int, body: dict[str, Any]) -> Said:
    found = await api.chat.completions.create(**body, extra_body={"speculation": {"gamma": gamma}})
    said = found.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in said.tool_calls or ()]
    return getattr(said, "reasoning_content", ""), said.content or "", calls, found.choices[0].finish_reason


async def streamed(api: AsyncOpenAI, body: dict[str, Any]) -> Said:
    texts, calls, reason = {"content": "", "reasoning_content": ""}, list[tuple[str, str]](), ""
    async for chunk in await api.chat.completions.create(**body, stream=True):
        delta = chunk.choices[0].delta
        for kind in texts:
            texts[kind] += getattr(delta, kind, None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                calls.append((call.function.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + (call.function.arguments or ""))
        reason = chunk.choices[0].finish_reason or reason
    return texts["reasoning_content"], texts["content"], calls, reason


async def in_every_way(api: AsyncOpenAI, body: dict[str, Any]) -> Said:
    """Return an answer that is the same streamed and without guesses."""
    found, plain, pieces = await asyncio.gather(whole(api, 4, body), whole(api, 0, body), streamed(api, body))
    assert found == plain == pieces
    return found


async def for_seeds(api: AsyncOpenAI, seeds: int, body: dict[str, Any]) -> list[Said]:
    return await asyncio.gather(*(in_every_way(api, body | {"seed": seed}) for seed in range(seeds)))


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name] or {"type": "object", "maxProperties": 0})


@pytest.mark.parametrize("choice", ["required", "auto", named("add")], ids=["required", "auto", "named"])
async def test_calls_are_valid_and_the_same_streamed_and_without_guesses(
    api: AsyncOpenAI, fleet: Cluster, choice: Any
) -> None:
    thoughts, contents, called = "", "", set()
    for reasoning, content, calls, reason in await for_seeds(api, 6, CALLS | {"tool_choice": choice}):
        check(calls)
        assert (len(calls), reason) == ((1, "tool_calls") if calls or choice != "auto" else (0, "stop"))
        thoughts, contents, called = thoughts + reasoning, contents + content, called | {name for name, _ in calls}
    assert all((thoughts, contents, called)), "all kinds of messages were drawn"
    assert speculation_counters(fleet.coordinators[0])["accepted_tokens"] > 0
    assert called == {"add"} or choice in ("auto", "required")


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["alone", "beside tools"])
async def test_the_final_message_has_the_format_and_thoughts_are_free(api: AsyncOpenAI, tools: list[Any]) -> None:
    thoughts = ""
    body = ASK | {"response_format": FORM} | ({"tools": tools} if tools else {})
    for reasoning, content, calls, reason in await for_seeds(api, 4, body):
        check(calls)
        assert calls or reason == "stop"
        if not calls:
            jsonschema.validate(json.loads(content), SCHEMAS["get_weather"])
        thoughts += reasoning
    assert thoughts


async def test_the_same_answers_as_items_which_can_be_sent_back(api: AsyncOpenAI) -> None:
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    given: dict[str, Any] = {"model": "", "tools": flat, "max_output_tokens": 3000, "temperature": 1}

    async def streamed_arguments(body: dict[str, Any]) -> str:
        async with api.responses.stream(**body) as stream:
            events = [event async for event in stream]
        return "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")

    async def kinds_for(seed: int) -> set[str]:
        more = {"logit_bias": BIAS, "seed": seed}
        body = given | {"input": CHAT, "tool_choice": "required", "extra_body": more}
        response, chat, arguments = await asyncio.gather(
            api.responses.create(**body), whole(api, 4, CALLS | {"seed": seed}), streamed_arguments(body)
        )
        texts = {"reasoning": "", "message": ""}
        for item in response.output[:-1]:
            texts[item.type] += item.content[0].text
        call = response.output[-1]
        assert chat == (*texts.values(), [(call.name, call.arguments)], "tool_calls")
        assert arguments == call.arguments
        again = [*CHAT, *response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Done."}]
        assert (await api.responses.create(**given, input=again, extra_body=more)).status == "completed"
        return {item.type for item in response.output}

    assert set().union(*await asyncio.gather(*map(kinds_for, range(4)))) == {"reasoning", "message", "function_call"}


async def test_an_agent_sends_thoughts_and_calls_back_as_they_came(api: AsyncOpenAI) -> None:
    """The target is shown them as it wrote them, as far as its template can."""
    for seed in range(8):
        answer = (await api.chat.completions.create(**CALLS | {"seed": seed})).choices[0].message
        if answer.content and getattr(answer, "reasoning_content", ""):
            break
    [call] = answer.tool_calls
    messages = [*CHAT, answer.model_dump(exclude_none=True)]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
    tokens: Any = await api.post("/../tokenize", body={"messages": messages, "tools": TOOLS}, cast_to=object)
    text: Any = await api.post("/../detokenize", body={"tokens": tokens["tokens"]}, cast_to=object)
    told = f"{answer.reasoning_content}\n\n{answer.content}"
    arguments = json.dumps(json.loads(call.function.arguments))
    assert text["prompt"].endswith(
        f"<|start|>assistant<|channel|>analysis<|message|>{told}<|end|>"
        f"<|start|>assistant to=functions.{call.function.name}<|channel|>commentary json<|message|>{arguments}<|call|>"
        f'<|start|>functions.{call.function.name} to=assistant<|channel|>commentary<|message|>"Sunny."<|end|>'
        "<|start|>assistant"
    )
    *_, reason = await whole(api, 4, CALLS | {"messages": messages})
    assert reason == "tool_calls"


async def test_without_tools_nothing_is_constrained_and_every_mark_is_read(api: AsyncOpenAI) -> None:
    """Noise has any order of marks."""
    marks = {str(KNOWN[f"<|{name}|>"]): 4 for name in ("start", "end", "message", "channel", "constrain")}
    for found in await for_seeds(api, 3, ASK | {"logit_bias": marks, "max_tokens": 120}):
        assert "|>" not in "".join(found[:2])


@pytest.mark.parametrize("mark", ["start", "channel"])
async def test_text_outside_of_messages_is_in_the_answer(api: AsyncOpenAI, mark: str) -> None:
    """Nothing constrains it, and the limit cuts it before any message has begun. It was lost."""
    known = {name: str(KNOWN[f"<|{name}|>"]) for name in ("start", "end", "return", "call", "message", "channel")}
    bias = dict.fromkeys(known.values(), -100) | {known[mark]: 3}
    starts = 0
    for seed in range(4):
        body: dict[str, Any] = ASK | {"logit_bias": bias, "seed": seed, "max_tokens": 60}
        choice: Any = (await api.chat.completions.create(**body, extra_body={"return_token_ids": True})).choices[0]
        start = int(known[mark])
        before = choice.token_ids[: choice.token_ids.index(start)] if start in choice.token_ids else choice.token_ids
        starts += start in choice.token_ids
        content = choice.message.content
        text = TOKENIZER.decode(before, skip_special_tokens=True)
        assert content.startswith(text.rstrip("\ufffd"))
        assert "|>" not in content
        assert await whole(api, 4, body) == ("", content, [], "length") == await streamed(api, body)
    assert starts
