"""What answers with tools may be: compiled by the real grammar engine, for every dialect and choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import AddedToken

from coordinator.api.http.agents import tool_grammar
from coordinator.api.http.agents.bodies import ChatBody, Function, Tool
from coordinator.api.http.agents.calls import forms
from coordinator.api.http.agents.calls.forms import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, Dialect
from coordinator.api.http.agents.parser import Manner
from coordinator.api.http.agents.tool_grammar import MAX_CALLS
from coordinator.workers.target import Target
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import Grammar, SamplingParams
from outrider.speculation.grammar import GrammarCompiler
from outrider.testing.toy_models import byte_tokenizer

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"get_weather": CITY, "get_time": NONE}
DIALECTS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral bare": MISTRAL_ARGS, "json": JSON}
DIALECTS |= {form.name: form for form in (forms.DEEPSEEK_V3, forms.KIMI_K2, forms.COHERE, forms.NEMOTRON)}
TAGGED = {it.name: it for it in (forms.QWEN3_CODER, forms.GLM47, forms.MINIMAX_M2, forms.DEEPSEEK_V32)}
PYTHON = {it.name: it for it in (forms.LFM2, forms.OLMO3, forms.PYTHONIC)}
ALL: dict[str, Dialect] = {**DIALECTS, **TAGGED, **PYTHON}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "</arg_value>", "｜DSML｜")
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<minimax:tool_call>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
SPECIAL += ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|END_ACTION|>")
SPECIAL += ("<|tool_call_start|>",)


def target_of(*, tokens: bool) -> Target:
    """A target whose markers are tokens of their own, or are spelled."""
    tokenizer = byte_tokenizer(MARKS if tokens else ())
    if tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(mark) for mark in SPECIAL]})
    compiler = GrammarCompiler(lambda: tokenizer_json(tokenizer), [tokenizer.eos_token_id])
    nothing: Any = None
    return Target(ModelInfo("m", "f", context_length=2048), tokenizer, nothing, compiler)


TARGETS = {tokens: target_of(tokens=tokens) for tokens in (False, True)}


def grammar_of(
    tools: Mapping[str, Any],
    manner: Manner,
    target: Target,
    *,
    required: bool,
    parallel: bool,
    answer: Grammar | None = None,
) -> Grammar:
    given = [Tool(type="function", function=Function(name=name)) for name in tools]
    choice: Any = "required" if required else "auto"
    body = ChatBody.model_construct(messages=[], tools=given, tool_choice=choice, parallel_tool_calls=parallel)
    grammar = tool_grammar.grammar_of(manner, tools, body, target, answer)
    assert grammar is not None
    return grammar


def allows(tokens: bool, dialect: Dialect, text: str, *, in_letters: bool = False, **choice: Any) -> tuple[bool, bool]:
    """Whether a whole answer is allowed, and whether its beginning is; `in_letters` without tokens for marks."""
    target = TARGETS[tokens]
    manner = Manner(dialect, True, choice.pop("thinks", False), choice.pop("thinking", False))
    choice = {"required": False, "parallel": True} | choice
    guide = target.grammars.compile(SamplingParams(grammar=grammar_of(TOOLS, manner, target, **choice)))
    ids = list(TARGETS[False if in_letters else tokens].encode(text))
    if guide.count_allowed(ids) < len(ids):
        return False, False
    guide.advance(ids)
    return guide._complete or guide.count_allowed([target.tokenizer.eos_token_id]) == 1, True


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", [*DIALECTS, *PYTHON])
def test_calls_follow_their_schema(name: str, tokens: bool) -> None:
    dialect = ALL[name]
    for required in (False, True):
        good = dialect.write("get_weather", {"city": "Köln }", "n": 3})
        assert allows(tokens, dialect, good, required=required) == (True, True), good
        assert allows(tokens, dialect, dialect.write("get_time", {}), required=required)[0]
        for bad in (
            dialect.write("get_weather", {"n": 3}),
            dialect.write("get_weather", {"city": 3}),
            dialect.write("get_time", {"city": "x"}),
            dialect.write("get_rain", {}),
        ):
            assert not allows(tokens, dialect, bad, required=required)[1], bad


@pytest.mark.parametrize("answer", [None, Grammar(json_object=True)], ids=["text", "formatted"])
@pytest.mark.parametrize("name", ALL)
def test_what_schemas_tell_people_takes_no_room(name: str, answer: Grammar | None) -> None:
    note = {"title": "x" * 9_000, "description": "y" * 40_000, "default": "z" * 20_000, "examples": [], "$comment": ""}
    plain = {"title": {"type": "string"}, "default": {"enum": ["", note["title"][:9]], "const": note["title"][:9]}}
    noted = {each: schema | note for each, schema in plain.items()}
    sizes = []
    for fields in (plain, noted):
        tool = {"type": "object", "properties": fields, "required": ["title", "default"]}
        manner, target = Manner(ALL[name], True), TARGETS[False]
        tools = {"f": tool | (note if fields is noted else {})}
        grammar = grammar_of(tools, manner, target, required=False, parallel=True, answer=answer)
        target.grammars.compile(SamplingParams(grammar=grammar))
        sizes.append(len(grammar.text))
    assert sizes[0] == sizes[1] < 2_000


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", ALL)
def test_text_is_free_with_auto_only(name: str, tokens: bool) -> None:
    dialect = ALL[name]
    text = 'A <b> [c] "d" 世界.\n'
    assert allows(tokens, dialect, text) == (True, True)
    assert allows(tokens, dialect, "") == (True, True)
    assert not allows(tokens, dialect, text, required=True)[1]
    assert not any(allows(tokens, dialect, part, required=True)[0] for part in ("", " "))
    after = text + dialect.write("get_time", {})
    assert allows(tokens, dialect, after)[0]
    assert allows(tokens, dialect, text + dialect.write("get_rain", {}))[1] is not dialect.anywhere, "a text, else"


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", ALL)
def test_several_calls_where_they_are_wanted(name: str, tokens: bool) -> None:
    dialect = ALL[name]
    one = dialect.write("get_time", {})
    if not (dialect.bare or dialect.opens_each):
        begins, ends = dialect.opener + dialect.before, dialect.after + dialect.closer
        inner = one.removeprefix(begins).removesuffix(ends)
        many = [begins + dialect.between.join([inner] * count) + ends for count in (2, MAX_CALLS, MAX_CALLS + 1)]
    else:
        many = [dialect.between.join([one] * count) for count in (2, MAX_CALLS, MAX_CALLS + 1)]
    for required in (False, True):
        assert [allows(tokens, dialect, text, required=required)[0] for text in many] == [True, True, False]
        assert not allows(tokens, dialect, many[0], required=required, parallel=False)[1]


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", ALL)
def test_thoughts_come_first(name: str, tokens: bool) -> None:
    dialect = ALL[name]
    good, bad = dialect.write("get_time", {}), dialect.write("get_rain", {})
    assert allows(tokens, dialect, f"<think>Hm {{.</think>{good}", thinks=True)[0]
    assert allows(tokens, dialect, f"Hm {{.</think>{good}", thinks=True, thinking=True, required=True)[0]
    assert not allows(tokens, dialect, f"Hm {{.</think>{bad}", thinks=True, thinking=True, required=True)[1]
    assert not allows(tokens, dialect, good, thinks=True, thinking=True, required=True)[0], "still thinking"
    assert allows(tokens, dialect, "Yes.", thinks=True)[0]


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
def test_a_call_that_begins_with_its_own_mark_is_constrained(tokens: bool) -> None:
    """As Qwen3-Coder writes some; only where text may come before."""
    form = forms.QWEN3_CODER
    good, bad = (form.write("get_weather", it).removeprefix("<tool_call>\n") for it in ({"city": "x"}, {"n": 3}))
    for before in ("", "A text.\n", "<tool_cal <func"):
        assert allows(tokens, form, before + good)[0]
        assert not allows(tokens, form, before + bad)[1]
        assert not allows(tokens, form, before + good, required=True)[1]
    again = form.between + form.write("get_time", {})
    assert allows(tokens, form, good + again)[0]
    assert not allows(tokens, form, good + again, parallel=False)[1]


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
def test_a_list_of_calls_without_a_mark_begins_the_answer(tokens: bool) -> None:
    form = forms.PYTHONIC
    for before in ("", " \n"):
        assert allows(tokens, form, f"{before}[get_weather(city='x'), get_time()]")[0]
        assert not allows(tokens, form, f"{before}[get_weather(n=3)]")[1]
    for text in ("[get_weather](x) (", '[1, "get_weather("]', "[get_rain", "A [get_weather(n=3)]", "get_weather(n=3)"):
        assert allows(tokens, form, text)[0], text
        assert not allows(tokens, form, text, required=True)[0], text


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", ["llama3", "json"])
def test_marks_in_letters_begin_no_free_text_with_a_call(name: str, tokens: bool) -> None:
    """The parser reads text: it does not know whether a mark was a token."""
    dialect = DIALECTS[name]
    good, bad = dialect.write("get_time", {}), dialect.write("get_rain", {})
    for before in ("", " \n", "<think>x</think>", " \t<think>{</think>\n"):
        for mark in ["", dialect.opener, f"{dialect.opener}\t {dialect.opener}"] if dialect.opener else [""]:
            text = before + mark
            assert not allows(tokens, dialect, text + bad, thinks=True, in_letters=True)[1], text
    assert allows(tokens, dialect, dialect.opener + good, in_letters=True)[0]
    assert allows(tokens, dialect, f"<think>x</think>{good}", thinks=True, in_letters=True)[0]
    for text in ("<think>x</think>Yes {", "<", "<thin {", "<|python_tag {", "\t{"):
        assert allows(tokens, dialect, text, in_letters=True)[0], text
        assert allows(tokens, dialect, text, thinks=True, in_letters=True)[0], text
    assert allows(tokens, dialect, "<think> {", in_letters=True)[0], "no thought for this model"


@pytest.mark.parametrize("formatted", [False, True], ids=["free", "formatted"])
@pytest.mark.parametrize("name", DIALECTS)
def test_a_schema_that_is_not_supported_is_named_by_its_tool(name: str, formatted: bool) -> None:
    bad = {"properties": {"a // b": {"type": "string", "format": "nonsense"}}}
    answer = Grammar(json_object=True) if formatted else None
    manner, target = Manner(DIALECTS[name], True), TARGETS[True]
    grammar = grammar_of({**TOOLS, "get-rain": bad}, manner, target, required=False, parallel=True, answer=answer)
    with pytest.raises(InvalidRequest, match=r"does not compile: get-rain: .*Unknown format: nonsense$"):
        target.grammars.compile(SamplingParams(grammar=grammar))
