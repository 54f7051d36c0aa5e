"""What answers in harmony may be, compiled by the real grammar engine; what is allowed is read as what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.gpt_oss.harmony import MARKS, HarmonyParser
from coordinator.api.http.agents.parser import PartKind
from coordinator.api.http.agents.replies import chat_input
from coordinator.workers.target import Target
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo
from outrider.settings.coordinator import CoordinatorSettings
from outrider.speculation.grammar import GrammarCompiler
from tests.harmony import harmony_tokenizer

TOKENIZER = harmony_tokenizer()
ENDS = TOKENIZER.convert_tokens_to_ids(["<|return|>", "<|call|>"])
NOTHING: Any = None
COMPILER = GrammarCompiler(lambda: tokenizer_json(TOKENIZER), ENDS)
TARGET = Target(ModelInfo("m", "f", context_length=8192), TOKENIZER, NOTHING, COMPILER)
CITY = {
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "f"}},
]
AGAIN = "<|start|>assistant"
THOUGHT, PREAMBLE, FINAL = (
    f"<|channel|>{name}<|message|>Hm {{}} < |e." for name in ("analysis", "commentary", "final")
)
WEATHER = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Köln }"}'
F = " to=functions.f<|channel|>commentary json<|message|>{}"
SCHEMA = {"type": "object", "properties": {"arguments": {"type": "boolean"}}, "required": ["arguments"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
GOOD, BAD = '{"arguments": true}', '{"arguments": 1}'
NAMED = {"type": "function", "function": {"name": "f"}}


def allows(text: str, **more: Any) -> tuple[bool, bool]:
    """Whether a whole answer is allowed, and whether its beginning is."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "?"}], **more})
    request, _ = chat_input(body, TARGET, CoordinatorSettings())
    guide, ids = COMPILER.compile(request.params), list(TARGET.encode(text))
    if guide.count_allowed(ids) < len(ids):
        return False, False
    if (end := guide.advance(ids)) not in (None, len(ids)):
        return False, False
    return end is not None or all(guide.count_allowed([token]) == 1 for token in ENDS), True


HEADS = [
    f"{recipient[0]}<|channel|>{channel}{recipient[1]}{form}<|message|>"
    for recipient in ((" to=functions.f", ""), ("", " to=functions.f"))
    for channel in ("commentary", "analysis")
    for form in ("", " json", " <|constrain|>json", "<|constrain|>json")
]


@pytest.mark.parametrize("head", HEADS)
def test_calls_have_every_form_that_the_model_writes_and_are_read_as_calls(head: str) -> None:
    for before in ("", THOUGHT + "<|end|>" + AGAIN):
        for choice in ("auto", "required", NAMED):
            assert allows(f"{before}{head}{{}}", tools=TOOLS, tool_choice=choice) == (True, True)
            assert not allows(f'{before}{head}{{"a"', tools=TOOLS, tool_choice=choice)[1]
    for mark, char in MARKS.items():
        head = head.replace(mark, char)
    parser = HarmonyParser(["f"])
    assert [part.kind for part in parser.feed(head + "{}")] == [PartKind.CALL, PartKind.ARGUMENTS]
    assert not parser.cut


@pytest.mark.parametrize("before", ["", THOUGHT, PREAMBLE, f"{THOUGHT}<|end|>{AGAIN}{PREAMBLE}<|end|>{AGAIN}{THOUGHT}"])
def test_thoughts_and_preambles_are_free(before: str) -> None:
    begin = before + f"<|end|>{AGAIN}" * bool(before)
    for choice in ("auto", "required", NAMED):
        given: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
        assert allows(begin + F, **given) == (True, True)
        assert allows(begin + WEATHER, **given)[1] is (choice is not NAMED)
        assert allows(begin + FINAL, **given) == (choice == "auto",) * 2
        assert not allows(begin, **given)[0], "no call and no answer"
        assert not allows(begin + F.replace("{}", '{"a": 1}'), **given)[1]
        assert not allows(begin + F.replace(".f", ".g"), **given)[1]
        assert not allows(begin + WEATHER.replace('"Köln }"', "3"), **given)[1]


@pytest.mark.parametrize("parallel", [None, True, False])
def test_an_answer_has_one_call_which_is_its_last_message(parallel: bool | None) -> None:
    """As `<|call|>` ends it: the template shows no second one."""
    given = {"tools": TOOLS, "parallel_tool_calls": parallel}
    assert allows(F, **given) == (True, True)
    for after in ("<|end|>", " ", F, "<|call|>" + AGAIN):
        assert allows(F + after, **given) == (False, False)


@pytest.mark.parametrize("choice", [None, "none"])
def test_without_tools_only_the_final_message_has_the_format(choice: str | None) -> None:
    given = FORMAT if choice is None else FORMAT | {"tools": TOOLS, "tool_choice": choice}
    final = "<|channel|>final<|message|>"
    for before in ("", THOUGHT + "<|end|>" + AGAIN, (THOUGHT + "<|end|>" + AGAIN) * 2):
        assert allows(before + final + GOOD, **given) == (True, True)
        assert allows(f"{before}<|channel|>final <|constrain|>json<|message|>{GOOD}", **given) == (True, True)
        assert not allows(before + final + BAD, **given)[1]
        assert not allows(before + F, **given)[1]
        assert not allows(before + PREAMBLE, **given)[1], "it would stand before the format in the content"
    assert not allows(THOUGHT, **given)[0]


def test_with_tools_an_answer_is_a_call_or_has_the_format() -> None:
    before = THOUGHT + "<|end|>" + AGAIN
    given = FORMAT | {"tools": TOOLS}
    assert allows(before + "<|channel|>final<|message|>" + GOOD, **given) == (True, True)
    assert allows(before + F, **given) == (True, True)
    assert allows(f"{PREAMBLE}<|end|>{AGAIN}{F}", **given) == (True, True)
    assert not allows(before + "<|channel|>final<|message|>" + BAD, **given)[1]
    assert not allows(f"{PREAMBLE}<|end|>{AGAIN}<|channel|>final<|message|>{GOOD}", **given)[1]
    assert allows(before + F, **given, tool_choice="required") == (True, True)
    assert not allows(before + "<|channel|>final<|message|>" + GOOD, **given, tool_choice="required")[1]


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"choice": [" a/b", "\n", "<think>"]}},
        {"response_format": {"type": "regex", "regex": " a/b|\\n|<think>"}},
    ],
)
def test_a_pattern_may_begin_with_anything(tools: list[Any], form: dict[str, Any]) -> None:
    """Other dialects keep white space and marks for calls and thoughts."""
    for text, allowed in ((" a/b", True), ("\n", True), ("<think>", True), ("a", False)):
        assert allows("<|channel|>final<|message|>" + text, tools=tools, **form)[0] is allowed


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_any_object_where_the_format_is_one(tools: list[Any]) -> None:
    given = {"tools": tools, "response_format": {"type": "json_object"}}
    assert allows('<|channel|>final<|message|>{"name": "f", "arguments": {}}', **given) == (True, True)
    assert not allows("<|channel|>final<|message|>[", **given)[1]


def test_an_answer_may_begin_before_its_header_or_after_it() -> None:
    """`add_generation_prompt: false`: the prompt ends before `<|start|>assistant`, or within a final message."""
    before: dict[str, Any] = {"add_generation_prompt": False}
    assert allows(AGAIN + F, tools=TOOLS, **before) == (True, True)
    assert not allows(F, tools=TOOLS, **before)[1]
    assert allows(f"{AGAIN}<|channel|>final<|message|>{GOOD}", **FORMAT, **before) == (True, True)
    within = before | {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "A"}],
        "continue_final_message": True,
    }
    assert allows(GOOD, **FORMAT, **within) == (True, True)
    assert not allows(BAD, **FORMAT, **within)[1]
    for choice in ("auto", "required"):
        given = within | {"tools": TOOLS, "tool_choice": choice}
        assert allows(f"ny.<|end|>{AGAIN}{F}", **given) == (True, True)
        assert allows("ny.", **given) == (choice == "auto", True)


def test_without_tools_and_format_nothing_is_constrained() -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "?"}]})
    assert chat_input(body, TARGET, CoordinatorSettings())[0].params.grammar is None


def test_a_schema_that_is_not_supported_is_named_by_its_tool() -> None:
    bad = {"properties": {"a": {"type": "string", "format": "nonsense"}}}
    tool = {"type": "function", "function": {"name": "get-rain", "parameters": bad, "strict": True}}
    with pytest.raises(InvalidRequest, match=r"does not compile: get-rain: .*Unknown format: nonsense$"):
        allows("", tools=[*TOOLS, tool])
    noted = {"title": "x" * 9_000, "description": "y" * 60_000, "default": json.dumps(bad)}
    tool = {"type": "function", "function": {"name": "noted", "parameters": CITY | noted}}
    assert allows("", tools=[tool])[1], "notes take no room"
