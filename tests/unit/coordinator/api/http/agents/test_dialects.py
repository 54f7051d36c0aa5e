"""How a chat template answers: which dialect it shows, and whether the prompt of a request opens the thoughts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.dialects import HERMES, JSON, manner_of
from coordinator.workers.target import Target

QUESTION = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
QWEN = QUESTION + (
    "{% if add_generation_prompt %}<assistant>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
DEEPSEEK = QUESTION + (
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
NO_PROMPT = {"add_generation_prompt": False}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
THOUGHTS = {"chat_template_kwargs": {"thinking": True}}


def target_of(template: str) -> Target:
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)
    return cast(Target, SimpleNamespace(tokenizer=tokenizer))


def chat(**more: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi."}]} | more)


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
    ],
)
def test_a_request_says_whether_its_prompt_opens_the_thoughts(
    template: str, more: dict[str, Any], thinking: bool
) -> None:
    manner = manner_of(target_of(template), "auto", chat(**more))
    assert (manner.thinks, manner.thinking) == (True, thinking)


def test_a_template_without_thoughts_opens_none() -> None:
    template = QUESTION + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    assert not manner_of(target_of(template), "auto", chat(**THOUGHTS)).thinking


def test_a_template_that_fails_opens_no_thoughts() -> None:
    template = "{% if thinking %}{{ raise_exception('no') }}{% endif %}</think><think>"
    assert manner_of(target_of(template), "auto", chat()).thinking
    assert not manner_of(target_of(template), "auto", chat(**THOUGHTS)).thinking


@pytest.mark.parametrize(
    ("more", "knows"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{%- for tool in tools or [] %}{{ tool.name }}{% endfor %}", True),
        ("{% if 'tools' in messages[0] %}{{ messages[0]['tools'] }}{{ messages[0].tools }}{% endif %}", False),
        ("{{ builtin_tools }}", False),
    ],
)
def test_a_template_knows_tools_that_it_takes_from_the_request(more: str, knows: bool) -> None:
    """That of Phi-4-mini has them in a system message, which no request has."""
    assert manner_of(target_of(QUESTION + more), "auto", chat()).knows_tools is knows


def test_the_template_shows_the_dialect_unless_one_is_named() -> None:
    target = target_of(QWEN + "{# <tool_call> #}")
    assert manner_of(target, "auto", chat()).dialect is HERMES
    assert manner_of(target, "json", chat()).dialect is JSON
