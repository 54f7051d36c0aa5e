"""A target that writes Hermes' calls and thinks first, as agents use it: reasoning, text and calls with `auto`.

The target is noise, so each answer is dictated as far as a client can: with biases that make the tokens of a script
likely, and a repetition penalty that makes each of them unlikely once it was said. Nothing is dictated after the
opening of a call: what follows is drawn, and only the grammar holds it to the tool's schema.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from coordinator.api.service import CoordinatorService
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import make_model
from tests.cluster import Redis, in_process
from tests.contract.conftest import Home, drafter_serving, verifier_serving
from tests.contract.test_tools import SCHEMAS, TOOLS, streamed

pytestmark = pytest.mark.asyncio(loop_scope="session")

OPEN, CLOSE, THINK, THOUGHT = MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Calls of the history have no marks, so that those of the answer are new.
TEMPLATE = (
    "{# <tool_call> #}{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
    "{% if verbosity %}<{{ verbosity }}>{% endif %}"
    "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'].split('</think>')[-1] }}"
    "{% for call in m['tool_calls'] %}{{ call['function'] | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is not false %}<think>{% endif %}{% endif %}"
)
CHAT: list[Any] = [{"role": "user", "content": "Weather?"}]
ASK: dict[str, Any] = {"model": "", "messages": CHAT, "tools": TOOLS, "max_tokens": 200, "temperature": 1, "seed": 3}


@dataclass(frozen=True)
class Agent:
    """A client of a coordinator with one target."""

    api: AsyncOpenAI
    home: Home

    def script(self, *texts: str) -> dict[str, Any]:
        """Options with which the answer begins with these tokens; each must be new to the prompt."""
        known = self.home.service.sessions.targets.named("").tokenizer.get_vocab()
        bias = {str(known[text]): 100 - 90 * number // len(texts) for number, text in enumerate(texts)}
        return {"logit_bias": bias, "extra_body": {"repetition_penalty": 10, "speculation": {"gamma": 3}}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def agent(redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Agent]:
    folder = make_model(
        tmp_path_factory.mktemp("models") / "target", seed=7, sharpness=4.0, focus=0.1, extra_tokens=MARKS
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    loaded = load_model(str(folder), EngineOptions(device="cpu"))
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=100, worker_wait_s=5)
    service = CoordinatorService(settings, redis_server.url)
    async with (
        in_process(service, settings) as coordinator,
        verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), coordinators=coordinator),
        drafter_serving(kind="ngram", coordinators=coordinator),
        AsyncOpenAI(base_url=f"http://{service.http_address}/v1", api_key="none", max_retries=0, timeout=60) as api,
    ):
        home = Home(coordinator, service, loaded)
        await home.knows(1)
        yield Agent(api, home)


def checked(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name] or {"type": "object", "maxProperties": 0})


async def test_auto_thinks_speaks_and_calls(agent: Agent) -> None:
    body = ASK | agent.script("Z", THOUGHT, "Q", OPEN) | {"parallel_tool_calls": False}
    completion = await agent.api.chat.completions.create(**body)
    whole = completion.choices[0]
    assert completion.usage.completion_tokens_details.reasoning_tokens == 1  # THOUGHT ends it
    assert whole.message.reasoning_content == "Z"
    assert whole.message.content == "Q"
    [call] = whole.message.tool_calls
    checked(call.function.name, call.function.arguments)
    assert whole.finish_reason == "tool_calls"
    body["extra_body"]["speculation"]["gamma"] = 0
    pieces, reason = await streamed(agent.api, **body)
    assert (pieces["content"], reason) == ("Q", "tool_calls")
    [piece] = pieces["tool_calls"]
    assert (piece["name"], piece["arguments"]) == (call.function.name, call.function.arguments)


async def test_a_large_chat_is_rendered_beside_the_loop(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to see whether its prompt opens the thoughts; its errors have the names of a chat all the same."""
    tokenizer = agent.home.service.sessions.targets.named("").tokenizer
    render, threads = tokenizer.apply_chat_template, []

    def noted(*given: Any, **more: Any) -> Any:
        threads.append(threading.get_ident())
        return render(*given, **more)

    monkeypatch.setattr(tokenizer, "apply_chat_template", noted)
    large: list[Any] = [{"role": "user", "content": "x" * 20_000}]
    with pytest.raises(openai.BadRequestError) as refused:
        await agent.api.chat.completions.create(**ASK | {"messages": large})
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_calls_that_the_template_drops_are_in_the_prompt(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SmolLM3's template does: an agent's second step did not see what it had called."""
    target = agent.home.service.sessions.targets.named("")
    called = "{% for call in m['tool_calls'] %}{{ call['function'] | tojson }}{% endfor %}"
    monkeypatch.setattr(target.tokenizer, "chat_template", TEMPLATE.replace(called, ""))
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"terms": [true]}'}}
    step: list[Any] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    given: dict[str, Any] = {"messages": CHAT + step, "tools": TOOLS}
    vars(target).pop("dropped", None)
    try:
        sent = await agent.api.post("/../tokenize", body=given, cast_to=dict[str, Any])
        usage = (await agent.api.chat.completions.create(model="", max_tokens=1, **given)).usage
    finally:
        vars(target).pop("dropped", None)
    assert usage.prompt_tokens == sent["count"]
    text = target.tokenizer.decode(sent["tokens"])
    assert '{"name": "add", "arguments": {"terms": [true]}}' in text
    assert "[tool]1" in text, "the template shows results"


async def test_auto_without_a_call(agent: Agent) -> None:
    found = (await agent.api.chat.completions.create(**ASK | agent.script("Z", THOUGHT, "Q", "<|end|>"))).choices[0]
    assert (found.message.reasoning_content, found.message.content) == ("Z", "Q")
    assert found.message.tool_calls is None
    assert found.finish_reason == "stop"


async def test_the_same_answer_as_items(agent: Agent) -> None:
    script = agent.script("Z", THOUGHT, "Q", OPEN)
    flat = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    more = script["extra_body"] | {"logit_bias": script["logit_bias"], "seed": 3}
    given: dict[str, Any] = {"input": "Weather?", "tools": flat, "parallel_tool_calls": False, "max_output_tokens": 200}
    async with agent.api.responses.stream(model="", temperature=1, extra_body=more, **given) as stream:
        kinds = [event.type.removeprefix("response.") async for event in stream]
        found = await stream.get_final_response()
    assert found.usage.output_tokens_details.reasoning_tokens == 1
    chat = (await agent.api.chat.completions.create(**ASK | script | {"parallel_tool_calls": False})).choices[0].message
    thought, said, call = found.output
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    assert thought.content[0].text == "Z"
    assert said.content[0].text == found.output_text == "Q"
    assert (call.name, call.arguments) == (chat.tool_calls[0].function.name, chat.tool_calls[0].function.arguments)
    assert [kind for kind in kinds if not kind.endswith("arguments.delta")] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done", "completed"),
    ]


async def test_the_same_answer_as_blocks(agent: Agent) -> None:
    """Thinking is asked for, its block can be sent back, and without a word of it there is none."""
    script = agent.script("Z", THOUGHT, "Q", OPEN)
    more = script["extra_body"] | {"logit_bias": script["logit_bias"]}
    tools = [
        {"name": tool["function"]["name"], "input_schema": {"type": "object", **tool["function"]["parameters"]}}
        for tool in TOOLS
    ]
    given = {"max_tokens": 200, "temperature": 1, "seed": 3, "tools": tools, "thinking": {"type": "adaptive"}}
    given["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}

    def prompt_of(message: Any) -> Any:
        return sum(message["usage"][name] for name in ("input_tokens", "cache_read_input_tokens"))

    async def ask(**changed: Any) -> Any:
        body = {"messages": CHAT} | given | more | changed
        return await agent.api.post("/messages", body=body, cast_to=object)

    found: Any = await ask()
    thought, said, call = found["content"]
    assert (thought["type"], thought["thinking"], said) == ("thinking", "Z", {"type": "text", "text": "Q"})
    assert thought["signature"], "some clients send no thinking back without one"
    assert found["stop_reason"] == "tool_use"
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
    chat = (await agent.api.chat.completions.create(**ASK | script | {"parallel_tool_calls": False})).choices[0].message
    [same] = chat.tool_calls
    assert (call["name"], call["input"]) == (same.function.name, json.loads(same.function.arguments))
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Done."}
    turns = [*CHAT, {"role": "assistant", "content": found["content"]}, {"role": "user", "content": [result]}]
    again: Any = await ask(messages=turns, max_tokens=1)
    told: list[Any] = [*CHAT, chat, {"role": "tool", "tool_call_id": same.id, "content": "Done."}]
    wanted = await agent.api.chat.completions.create(model="", messages=told, tools=TOOLS, max_tokens=1)
    assert prompt_of(again) == wanted.usage.prompt_tokens
    for thinking in (None, {"type": "disabled"}):
        plain: Any = await ask(thinking=thinking, tool_choice={"type": "none"}, output_config={"effort": "high"})
        target = agent.home.service.sessions.targets.named("")
        assert prompt_of(plain) == len(target.encode("<high>[user]Weather?[assistant]", special=False))


@pytest.mark.parametrize("gamma", [0, 3])
async def test_an_agent_with_auto_calls_and_ends(agent: Agent, gamma: int) -> None:
    """Each answer goes back as it came. Nobody names a tool."""
    messages, called = list(CHAT), []
    for script in ((THOUGHT, OPEN, "g"), (THOUGHT, OPEN, "a"), (THOUGHT, "Q", "<|end|>")):
        body = ASK | {"messages": messages, "parallel_tool_calls": False} | agent.script(*script)
        body["extra_body"]["speculation"]["gamma"] = gamma
        answer = (await agent.api.chat.completions.create(**body)).choices[0]
        messages.append(answer.message)
        for call in answer.message.tool_calls or ():
            checked(call.function.name, call.function.arguments)
            called.append(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Done."})
    assert len(called) == 2
    assert (messages[-1].content, answer.finish_reason) == ("Q", "stop")


@pytest.mark.parametrize(
    ("stop", "content", "calls", "reason"),
    [
        (OPEN, "Q", 0, "stop"),  # the text before the mark, and no call
        (CLOSE, "Q", 1, "tool_calls"),  # the call is whole
        ('"arguments"', "Q", 0, "stop"),  # its name was not yet told
        ('"terms"', "Q", 1, "stop"),  # its arguments are cut
        ("Q", "", 0, "stop"),
        (THOUGHT, "", 0, "stop"),
    ],
)
async def test_stop_strings_cut_before_marks_are_read(
    agent: Agent, stop: str, content: str, calls: int, reason: str
) -> None:
    body = ASK | agent.script("Z", THOUGHT, "Q", OPEN, "a") | {"parallel_tool_calls": False, "stop": stop}
    found = (await agent.api.chat.completions.create(**body)).choices[0]
    assert found.message.reasoning_content == "Z"
    assert (found.message.content or "").startswith(content)
    assert len(found.message.tool_calls or ()) == calls
    assert found.finish_reason == reason
    pieces, streamed_reason = await streamed(agent.api, **body)
    assert pieces["content"] == (found.message.content or "")
    assert len(pieces["tool_calls"]) == calls
    assert streamed_reason == reason


@pytest.mark.parametrize(
    ("effort", "verbosity", "thinking", "wanted"),
    [
        (None, None, {}, "[user]Weather?[assistant]<think>"),
        ("low", None, {}, "<low>[user]Weather?[assistant]<think>"),
        ("none", "high", {}, "<none><high>[user]Weather?[assistant]"),
        (None, "low", {}, "<low>[user]Weather?[assistant]<think>"),
        ("none", None, {"enable_thinking": True}, "<none>[user]Weather?[assistant]<think>"),
        (None, None, {"enable_thinking": False}, "[user]Weather?[assistant]"),
    ],
)
async def test_a_reasoning_effort_and_a_verbosity_are_the_templates(
    agent: Agent, effort: Any, verbosity: Any, thinking: dict[str, bool], wanted: str
) -> None:
    """In chats, responses and for /tokenize."""
    more: dict[str, Any] = {"chat_template_kwargs": thinking} if thinking else {}
    size = len(agent.home.service.sessions.targets.named("").encode(wanted, special=False))
    asked = {"reasoning_effort": effort, "verbosity": verbosity}
    chat = await agent.api.chat.completions.create(model="", messages=CHAT, max_tokens=1, extra_body={**more, **asked})
    assert chat.usage is not None
    tokens: Any = await agent.api.post(
        "/../tokenize",
        body={"messages": CHAT, **more, **asked, "return_token_strs": True},
        cast_to=object,
    )
    assert (chat.usage.prompt_tokens, tokens["count"]) == (size, size)
    parts: Any = {"reasoning": {"effort": effort}, "text": {"verbosity": verbosity}}
    response = await agent.api.responses.create(
        model="", input="Weather?", max_output_tokens=1, **parts, extra_body=more
    )
    assert response.usage is not None
    assert response.usage.input_tokens == size
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        await agent.api.chat.completions.create(
            model="", messages=CHAT, extra_body={"chat_template_kwargs": {"chat_template": "x"}}
        )
