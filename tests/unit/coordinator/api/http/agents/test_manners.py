"""How a chat template answers: which dialect it shows, and whether the prompt of a request opens the thoughts."""

from __future__ import annotations

from typing import Any, cast

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.calls.forms import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, Dialect
from coordinator.api.http.agents.manners import TextManner, chat_of, manner_of
from coordinator.api.http.agents.replies import chat_input
from coordinator.workers.target import Target
from outrider.protocol.fleet import ModelInfo
from outrider.settings.coordinator import CoordinatorSettings

QUESTION = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
QWEN = QUESTION + (
    "{% if add_generation_prompt %}<assistant>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
DEEPSEEK = QUESTION + (
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
# As of Nemotron Nano 2, whose thoughts a message turns off.
NEMOTRON = QUESTION + (
    "{% if add_generation_prompt %}<assistant>{% if '/no_think' in messages[0]['content'] %}<think></think>"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
# As part of a template that shows what was called.
CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.arguments.values() | join }}"
    "{% endfor %}{% endfor %}"
)
# As of DeepSeek R1, which goes on after the result of a tool.
R1 = (
    QUESTION
    + CALLS
    + "</think>{% if messages[-1]['role'] != 'tool' %}<assistant><think>\n{% endif %}{# {{ tools }} <tool_call> #}"
)
OFF = {"messages": [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "Hi."}]}
CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"messages": [{"role": "user", "content": "?"}, CALLED, {"role": "tool", "tool_call_id": "a", "content": "1"}]}
NO_PROMPT = {"add_generation_prompt": False}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
THOUGHTS = {"chat_template_kwargs": {"thinking": True}}


def target_of(template: str) -> Target:
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)
    nothing: Any = None
    return Target(ModelInfo("m", "f"), tokenizer, nothing, nothing)


def chat(**more: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi."}]} | more)


def thinks(template: str, **more: Any) -> bool | None:
    """Return whether an answer begins with thoughts; None: it may."""
    settings = CoordinatorSettings(tool_parser="auto")
    [parser] = chat_input(chat(**more), target_of(template), settings)[1]
    return parser.is_thinking()


@pytest.mark.parametrize(
    ("template", "more", "thinking"),
    [
        (QWEN, {}, True),
        (QWEN, NO_THOUGHTS, False),
        (QWEN, {"reasoning_effort": "none"}, False),
        (QWEN, {"reasoning_effort": "high"}, True),
        (QWEN, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
        (QWEN, NO_PROMPT, False),
        (DEEPSEEK, {}, False),
        (DEEPSEEK, THOUGHTS, True),
        (DEEPSEEK, {"chat_template_kwargs": {"thinking": False}}, False),
        (DEEPSEEK, THOUGHTS | NO_PROMPT, False),
        (NEMOTRON, {}, True),
        (NEMOTRON, OFF, False),
        (R1, {}, True),
        (R1, RESULT, False),
    ],
)
def test_a_request_says_whether_its_prompt_opens_the_thoughts(
    template: str, more: dict[str, Any], thinking: bool
) -> None:
    assert thinks(template, **more) is (thinking or (False if "add_generation_prompt" in more else None))


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("<|start_header_id|>user<|end_header_id|>{{ tools }}", JSON),  # Llama 3, which knows no tools
        ("""<|start_header_id|>{{ tools }}{"name": function name, "parameters": dictionary}""", LLAMA3),  # 3.2
        ("""<start_of_turn>{{ tools }}{"name": function name, "parameters": dictionary}""", JSON),
        ("{{ tools }}<|python_tag|>", LLAMA3),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }}[TOOL_CALLS][ARGS]", MISTRAL_ARGS),
        ("{{ tools }}<tool_call>", HERMES),
    ],
)
def test_a_template_shows_the_dialect_of_its_calls(template: str, dialect: Dialect) -> None:
    assert manner_of(target_of(template), "auto").dialect is dialect


def test_a_template_without_thoughts_opens_none() -> None:
    template = QUESTION + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    assert not thinks(template, **THOUGHTS)


def test_a_template_that_fails_opens_no_thoughts() -> None:
    template = "{% if thinking %}{{ raise_exception('no') }}{% endif %}</think><think>"
    assert thinks(template)
    assert not thinks(template, **THOUGHTS)


@pytest.mark.parametrize(
    ("more", "knows"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>", True),
        ("{%- for tool in tools or [] %}{{ tool.name }}{% endfor %}[TOOL_CALLS]", True),
        (
            "<tool_call>{% if 'tools' in messages[0] %}{{ messages[0]['tools'] + messages[0].tools }}{% endif %}",
            False,
        ),
        ("{{ builtin_tools }}<tool_call>", False),
        ("{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>\n<function=NAME>\n<parameter=P>", True),
        ("{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>NAME\n<arg_key>P</arg_key>", True),
        ("{{ tools }} as objects within <tool_call></tool_call>: <tool_calls>[...]</tool_calls>", True),
        ("{{ tools }}<|call|>f(1)", False),
    ],
)
def test_a_template_knows_tools_that_it_takes_from_the_request(more: str, knows: bool) -> None:
    """That of Phi-4-mini has them in a message of the system."""
    assert manner_of(target_of(QUESTION + more), "auto").knows_tools is knows


def test_a_template_whose_form_of_calls_is_unknown_does_not_tell_of_tools() -> None:
    """The target would write calls in its form, and be held to another one, of which it was told nothing."""
    other = target_of(QUESTION + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|call|>f(1)")
    assert [manner_of(other, parser).knows_tools for parser in ("auto", "json", "hermes")] == [False, True, True]


def test_a_template_apart_for_tools_shows_no_calls_in_chats_without_tools() -> None:
    """As of Hermes 2 Pro: the default template, which these chats are rendered by, would drop their calls."""
    told = QUESTION + CALLS + "{% for tool in tools or [] %}{{ tool }}{% endfor %}<tool_call>"
    target = target_of(told)
    target.tokenizer.chat_template = cast(Any, {"default": QUESTION, "tool_use": told})
    manner = manner_of(target, "auto")
    body = chat(**RESULT)
    without = chat_of(body, (), manner, target)
    assert without.messages[1]["content"] == HERMES.write("f", {})
    assert without.messages[2] == {"role": "user", "content": "Result of f:\n1"}
    tools = chat(tools=[{"type": "function", "function": {"name": "f"}}]).tools or ()
    assert chat_of(body, tools, manner, target).messages[1]["tool_calls"]
    both = target_of(told)
    assert chat_of(body, (), manner_of(both, "auto"), both).messages[1]["tool_calls"], "one template for both"


def test_the_template_shows_the_dialect_unless_one_is_named() -> None:
    target = target_of(QWEN + "{# <tool_call> #}")
    assert manner_of(target, "auto").dialect is HERMES
    assert manner_of(target, "json").dialect is JSON


def rendered(template: str, **more: Any) -> str:
    """Return the prompt of a chat, as its target's template writes it."""
    settings = CoordinatorSettings(tool_parser="auto")
    target, body = target_of(template), chat(**more)
    made = chat_of(body, body.tools or (), manner_of(target, settings.tool_parser), target)
    tools = [*made.tools] or None
    return str(target.tokenizer.apply_chat_template([*made.messages], tools=tools, tokenize=False, **made.variables))


SYSTEM = {"role": "system", "content": "Be kind."}
DEVELOPER = {"role": "developer", "content": "Be short."}
USER = {"role": "user", "content": "Hi."}
# As of Qwen3.5 and of Mistral 7B; that of Qwen3-VL drops further messages of the system without an error.
FIRST_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [QUESTION, FIRST_ONLY, FIRST_ONLY.replace("must be at", "is not at")])
def test_messages_of_the_system_at_the_beginning_are_one(template: str) -> None:
    begun = "<system>Be kind.\n\nBe short.\n<user>Hi.\n"
    assert rendered(template, messages=[SYSTEM, DEVELOPER, USER]) == begun
    empty = SYSTEM | {"content": ""}
    assert rendered(template, messages=[SYSTEM, empty, DEVELOPER, USER]) == begun
    assert rendered(template, messages=[empty, USER]) == "<system>\n<user>Hi.\n"


@pytest.mark.parametrize(
    "rule", ["must be at the beginning", "or initial optional system", "user, assistant and tool roles are supported"]
)
def test_later_messages_of_the_system_come_first_where_the_template_refuses_them(rule: str) -> None:
    messages = [SYSTEM, USER, DEVELOPER, USER]
    assert rendered(QUESTION, messages=messages) == "<system>Be kind.\n<user>Hi.\n<system>Be short.\n<user>Hi.\n"
    strict = FIRST_ONLY.replace("System message must be at the beginning", rule)
    assert rendered(strict, messages=messages) == "<system>Be kind.\n\nBe short.\n<user>Hi.\n<user>Hi.\n"
    assert rendered(strict, messages=messages[1:]) == "<system>Be short.\n<user>Hi.\n<user>Hi.\n"


def test_later_messages_of_the_system_stay_where_only_a_first_one_is_refused() -> None:
    """A question that repeats itself is refused there, too: what is tried is a chat in turns, as this one begins."""
    rule = "m['role'] == ('system' if loop.first else messages[loop.index0 - 1]['role'])"
    template = FIRST_ONLY.replace("m['role'] == 'system' and not loop.first", rule)
    shown = "<user>Hi.\n<system>Be kind.\n<user>Hi.\n"
    assert rendered(template, messages=[USER, SYSTEM, USER]) == shown


# As of SmolLM3, which shows tools and results, but no calls.
DROPS_CALLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{# <tool_call> #}{% endif %}"
    "{% for m in messages %}<{{ 'user' if m['role'] == 'tool' else m['role'] }}>{{ m['content'] }}\n{% endfor %}"
)
FIND = {"tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]}
FOUND = {"id": "a", "function": {"name": "find", "arguments": '{"word": "x"}'}}
STEP = [USER, {"role": "assistant", "tool_calls": [FOUND]}, {"role": "tool", "tool_call_id": "a", "content": "On 3."}]


@pytest.mark.parametrize("tools", [FIND, {}])
def test_calls_that_a_template_with_tools_drops_are_put_in_words(tools: dict[str, Any]) -> None:
    """An agent's second step did not see what its first one had called."""
    told = rendered(DROPS_CALLS, messages=STEP, **tools)
    call = HERMES.write("find", {"word": "x"})
    result = "On 3." if tools else "Result of find:\nOn 3."
    assert told.endswith(f"<user>Hi.\n<assistant>{call}\n<user>{result}\n")
    assert told.count('"find"') == (2 if tools else 1), "the template tells of the tools, once"
    assert "You can call" not in told


def test_the_template_is_tried_once_and_only_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = target_of(DROPS_CALLS), list[Any]()
    monkeypatch.setattr(Target, "preview", lambda self, chat: seen.append(chat) or "")
    tools = chat(**FIND).tools or ()
    for messages in ([USER], STEP, STEP):
        chat_of(chat(messages=messages), tools, manner_of(target, "auto"), target)
        assert len(seen) == (0 if messages == [USER] else 2), "one chat without tools, and one with some"


def test_the_template_is_tried_once_for_late_messages_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen, tried = target_of(QUESTION), list[Any](), Target.preview
    monkeypatch.setattr(Target, "preview", lambda self, chat: seen.append(chat) or tried(self, chat))
    for _ in range(2):
        told = chat_of(chat(messages=[USER, SYSTEM, USER]), (), manner_of(target, "auto"), target)
        assert [message["role"] for message in told.messages] == ["user", "system", "user"]
        assert len(seen) == 1


# As of MiniMax M2, which shows the first message of the system, of DeepSeek R1, which shows the last one, and of Phi-3.
FIRST_SHOWN = (
    "{% for m in messages %}{% if loop.first or m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}\n"
    "{% endif %}{% endfor %}"
)
LAST_SHOWN = (
    "{% set ns = namespace(told='') %}{% for m in messages if m['role'] == 'system' %}{% set ns.told = m['content'] %}"
    "{% endfor %}<system>{{ ns.told }}\n{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>"
    "{{ m['content'] }}\n{% endfor %}"
)
NONE_SHOWN = "{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
# As of Mistral 7B v0.1 and Mixtral, which say nothing of the system.
IN_TURN = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [FIRST_SHOWN, LAST_SHOWN])
def test_later_messages_of_the_system_come_first_where_the_template_drops_some(template: str) -> None:
    expected = "<system>Be kind.\n\nBe short.\n<user>Hi.\n<user>Hi.\n"
    assert rendered(template, messages=[SYSTEM, USER, DEVELOPER, USER]) == expected


@pytest.mark.parametrize("template", [NONE_SHOWN, IN_TURN])
def test_a_template_that_shows_no_message_of_the_system_has_tools_in_the_first_other_one(template: str) -> None:
    """Those of Phi-3 were told of no tool, and requests to Mistral 7B v0.1 and Mixtral were refused."""
    tools = {"tools": [{"type": "function", "function": {"name": "find"}}]}
    told = rendered(template, **tools)
    assert told.startswith("<user>Hi.\n\nYou can call these functions.")
    assert '{"name": "find"}' in told
    if template is NONE_SHOWN:
        assert rendered(template, messages=[SYSTEM, USER], **tools) == told
        assert rendered(template, messages=[SYSTEM], **tools) == ""


NINE = (
    CALLS + "{% for m in messages %}"
    "{% for id in [m.tool_call_id] + m.tool_calls | default([]) | map(attribute='id') | list %}"
    "{% if id is defined %}{% if id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings "
    "with length 9!') }}{% endif %}{{ id }};{% endif %}{% endfor %}"
    "{{ m.content if m.role == 'tool' }}{% endfor %}{# {{ tools }} [TOOL_CALLS] #}"
)


@pytest.mark.parametrize(
    ("given", "told"), [("call_1", "000call_1"), ("call_0fypS1hVXa", "fypS1hVXa"), ("0123abcde", "0123abcde")]
)
def test_ids_of_calls_have_the_length_that_templates_of_mistral_want(given: str, told: str) -> None:
    """Agents write ids of their own, and those of other servers are in chats that go on with another model."""
    called = CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"id": given}]}  # type: ignore[index]
    messages = [USER, called, {"role": "tool", "tool_call_id": given, "content": "1"}]
    assert rendered(NINE, messages=messages) == f"{told};{told};1"
    assert rendered(NINE.replace("[TOOL_CALLS]", "<tool_call>").replace(" != 9", " == 0"), messages=messages) == (
        f"{given};{given};1"
    )


HERMES_3 = (
    "{% for tool in tools %}{% set tool = tool.function %}{{ tool.name + '(' }}"
    "{% for name, field in tool.parameters.properties | items %}{{ name }}{% endfor %}{{ ') - ' + tool.description }}"
    "{% endfor %}{# <tool_call> #}"
)


@pytest.mark.parametrize("more", [{}, {"description": None, "parameters": None}, {"parameters": {}}])
def test_templates_read_all_fields_of_a_tool_that_leaves_them_out(more: dict[str, Any]) -> None:
    """That of Hermes 3 raises an error for a tool without them, which OpenAI takes."""
    assert rendered(HERMES_3, tools=[{"type": "function", "function": {"name": "f"} | more}]) == "f() - "


@pytest.mark.parametrize("name", ["clear_thinking", "preserve_thinking", "reasoning"])
@pytest.mark.parametrize("value", [True, False])
def test_variables_of_real_templates_that_turn_thoughts_on_and_off_reach_them(name: str, value: bool) -> None:
    """Agents send them with GLM-4.7 and GLM-5, Qwen3.6 and Command A Reasoning; other servers take any."""
    assert rendered(f"{{{{ {name} }}}}", chat_template_kwargs={name: value}) == str(value)
    with pytest.raises(ValidationError, match="chat_template_kwargs"):
        chat(chat_template_kwargs={name: "<|im_end|>"})


def test_thoughts_stay_in_a_chat_whose_calls_are_told_in_words() -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert rendered(template, messages=[USER, said]) == "[]Hi.[Hm.]Yes."
    call = HERMES.write("f", {})
    body = chat(messages=[USER, CALLED | {"reasoning_content": "Hm."}])
    made = chat_of(body, (), TextManner(HERMES, knows_tools=False), target_of(template))
    assert made.messages[1] == {"role": "assistant", "content": call, "reasoning_content": "Hm."}
