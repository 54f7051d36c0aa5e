"""Calls between marks as models write them: whole, in pieces, cut and broken; texts as they arrive."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.http.agents.calls import forms
from coordinator.api.http.agents.calls.forms import Dialect, Marked
from coordinator.api.http.agents.parser import AnswerParser, Manner, PartKind
from tests.unit.coordinator.api.http.agents.test_parser import Answer, cuts, parsed

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "fine": {"type": "boolean"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "spots": {"type": "array", "items": {"type": "object"}},
        "id": {"type": ["integer", "string"]},
        "any": {},
        "level": {"enum": ["1", 2]},
    },
}
SCHEMAS = {"get_weather": WEATHER, "get_time": {}, "f": {"additionalProperties": {"type": "number"}}}
# As the models' own templates write them, character by character.
QWEN = """<tool_call>
<function=get_weather>
<parameter=city>
Köln "am
 Rhein" <b>
</parameter>
<parameter=days>
3
</parameter>
<parameter=spots>
[{"x": "a\\n"}, {}]
</parameter>
</function>
</tool_call>"""
CITY = 'Köln "am\n Rhein" <b>'
ARGUMENTS = f'{{"city": {json.dumps(CITY, ensure_ascii=False)}, "days": 3, "spots": [{{"x": "a\\n"}}, {{}}]}}'
VALUES = {"city": CITY, "days": 3, "spots": [{"x": "a\n"}, {}]}
SEED = (
    f"<seed:tool_call>\n<function=get_weather>\n<parameter=city>{CITY}</parameter>\n<parameter=days>3</parameter>\n"
    '<parameter=spots>[{"x": "a\\n"}, {}]</parameter>\n</function>\n</seed:tool_call>'
)
GLM45 = (
    f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
    '<arg_value>3</arg_value>\n<arg_key>spots</arg_key>\n<arg_value>[{"x": "a\\n"}, {}]</arg_value>\n</tool_call>'
)
GLM47 = (
    f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value><arg_key>days</arg_key><arg_value>3"
    '</arg_value><arg_key>spots</arg_key><arg_value>[{"x": "a\\n"}, {}]</arg_value></tool_call>'
)
MINIMAX = (
    f'<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">{CITY}</parameter>\n<parameter '
    'name="days">3</parameter>\n<parameter name="spots">[{"x": "a\\n"}, {}]</parameter>\n</invoke>\n'
    '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>'
)
DEEPSEEK_V32 = MINIMAX.partition('<invoke name="get_time')[0].replace("minimax:tool_call", "function_calls")
DEEPSEEK_V32 = DEEPSEEK_V32.replace("</", "</｜DSML｜").replace("<p", "<｜DSML｜p").replace("<i", "<｜DSML｜i")
DEEPSEEK_V32 = DEEPSEEK_V32.replace("<f", "<｜DSML｜f").replace('"city">', '"city" string="true">')
DEEPSEEK_V32 = re.sub('(days|spots)">', r'\1" string="false">', DEEPSEEK_V32) + "</｜DSML｜function_calls>"
DEEPSEEK_V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V3 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
KIMI = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}"
    "<|tool_call_end|><|tool_call_begin|>functions.get_time:11<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
COHERE = (
    f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}},\n    '
    '{"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>'
)
LISTED = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
ONE, TWO = [("get_weather", ARGUMENTS)], [("get_weather", ARGUMENTS), ("get_time", "{}")]
SAMPLES: dict[str, tuple[Dialect, str, Answer]] = {
    "qwen3_coder": (forms.QWEN3_CODER, QWEN, Answer(calls=ONE)),
    "qwen3_coder text and two": (
        forms.QWEN3_CODER,
        f"So.\n{QWEN}\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        Answer("So.\n", calls=TWO),
    ),
    "seed_oss": (forms.SEED_OSS, SEED, Answer(calls=ONE)),
    "mimo": (forms.MIMO, SEED.replace("seed:", ""), Answer(calls=ONE)),
    "glm45": (forms.GLM45, f"{GLM45}\n<tool_call>get_time\n</tool_call>", Answer(calls=TWO)),
    "glm47": (forms.GLM47, f"Hm.{GLM47}<tool_call>get_time</tool_call>", Answer("Hm.", calls=TWO)),
    "minimax_m2": (forms.MINIMAX_M2, MINIMAX, Answer(calls=TWO)),
    "deepseek_v32": (forms.DEEPSEEK_V32, DEEPSEEK_V32, Answer(calls=ONE)),
    "deepseek_v31": (forms.DEEPSEEK_V31, DEEPSEEK_V31, Answer(calls=TWO)),
    "deepseek_v3": (forms.DEEPSEEK_V3, DEEPSEEK_V3, Answer(calls=TWO)),
    "kimi_k2": (forms.KIMI_K2, f"So. {KIMI}", Answer("So. ", calls=TWO)),
    "cohere": (forms.COHERE, COHERE, Answer(calls=TWO)),
    "nemotron": (
        forms.NEMOTRON,
        f'So.\n\n<TOOLCALL>[{LISTED}, {{"name": "get_time", "arguments": {{}}}}]</TOOLCALL>',
        Answer("So.\n\n", calls=TWO),
    ),
    "hunyuan_a13b": (forms.HUNYUAN, f"<tool_calls>[\n    {LISTED}\n]</tool_calls>", Answer(calls=ONE)),
    "granite": (forms.GRANITE, f"<|tool_call|>[{LISTED}]", Answer(calls=ONE)),
    "phi4_mini_json": (forms.PHI4, f"functools[{LISTED}]", Answer(calls=ONE)),
    # Types are those of the schema.
    "a text that looks like a number": (
        forms.GLM47,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>50667</arg_value></tool_call>",
        Answer(calls=[("get_weather", '{"city": "50667"}')]),
    ),
    "null or a text": (
        forms.GLM47,
        "<tool_call>get_weather<arg_key>unit</arg_key><arg_value>null</arg_value><arg_key>id</arg_key><arg_value>7"
        "</arg_value></tool_call>",
        Answer(calls=[("get_weather", '{"unit": null, "id": 7}')]),
    ),
    "a text or null": (
        forms.GLM47,
        "<tool_call>get_weather<arg_key>unit</arg_key><arg_value>3</arg_value><arg_key>id</arg_key><arg_value>x7"
        "</arg_value></tool_call>",
        Answer(calls=[("get_weather", '{"unit": "3", "id": "x7"}')]),
    ),
    "no value of its type": (
        forms.GLM47,
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>many</arg_value><arg_key>fine</arg_key><arg_value>NaN"
        "</arg_value></tool_call>",
        Answer(calls=[("get_weather", '{"days": "many", "fine": "NaN"}')]),
    ),
    "of no type, and undeclared": (
        forms.GLM47,
        "<tool_call>get_weather<arg_key>any</arg_key><arg_value>3</arg_value><arg_key>zip</arg_key><arg_value>4"
        "</arg_value></tool_call>",
        Answer(calls=[("get_weather", '{"any": "3", "zip": "4"}')]),
    ),
    "of the type of further ones": (
        forms.SEED_OSS,
        "<seed:tool_call>\n<function=f>\n<parameter=a>1e3</parameter>\n</function>\n</seed:tool_call>",
        Answer(calls=[("f", '{"a": 1e3}')]),
    ),
    "lines of a text": (
        forms.QWEN3_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\nx\n\n</parameter>\n<parameter=any>\n</parameter>\n"
        "</function>\n</tool_call>",
        Answer(calls=[("get_weather", '{"city": "\\nx\\n", "any": ""}')]),
    ),
    "a text without its line feed": (
        forms.QWEN3_CODER,
        "<tool_call><function=get_weather><parameter=city>x</parameter></function></tool_call>",
        Answer(calls=[("get_weather", '{"city": "x"}')]),
    ),
    "tags of others within a text": (
        forms.MIMO,
        "<tool_call>\n<function=get_weather>\n<parameter=city></function></tool_call></param</parameter>\n</function>\n"
        "</tool_call>",
        Answer(calls=[("get_weather", '{"city": "</function></tool_call></param"}')]),
    ),
    "the tag that ends a value within a list": (
        forms.GLM47,
        '<tool_call>get_weather<arg_key>spots</arg_key><arg_value>[{"x": "\\\\\\"</arg_value>", "y": "\\\\"}]'
        "</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        Answer(calls=[("get_weather", '{"spots": [{"x": "\\\\\\"</arg_value>", "y": "\\\\"}], "days": 3}')]),
    ),
    "texts and numbers that look alike": (
        forms.GLM47,
        "<tool_call>get_weather<arg_key>level</arg_key><arg_value>1</arg_value><arg_key>spots</arg_key><arg_value>[]"
        "</arg_value></tool_call><tool_call>get_weather<arg_key>level</arg_key><arg_value>2</arg_value></tool_call>",
        Answer(calls=[("get_weather", '{"level": "1", "spots": []}'), ("get_weather", '{"level": 2}')]),
    ),
    "without the opener": (
        forms.QWEN3_CODER,
        QWEN.removeprefix("<tool_call>\n"),
        Answer(calls=ONE),
    ),
    "after text, without the opener": (
        forms.QWEN3_CODER,
        f"So <func. {QWEN.removeprefix('<tool_call>')}\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        Answer("So <func. \n", calls=TWO),
    ),
    "without openers and closers": (
        forms.MIMO,
        "So.<function=f>\n</function>\n<function=get_time>\n</function>",
        Answer("So.\n", calls=[("f", "{}"), ("get_time", "{}")]),
    ),
    # Broken, or no calls at all: nothing is lost.
    "an unknown function without the opener": (
        forms.QWEN3_CODER,
        "<function=g>\n</function> <function=",
        Answer("<function=g>\n</function> <function="),
    ),
    "an unknown function": (
        forms.QWEN3_CODER,
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        Answer("<tool_call>\n<function=g>\n</function>\n</tool_call>"),
    ),
    "no function": (forms.QWEN3_CODER, "<tool_call>\n<func", Answer("<tool_call>\n<func")),
    "json": (forms.GLM45, '<tool_call>\n{"name": "f"}', Answer('<tool_call>\n{"name": "f"}')),
    "a mark alone": (forms.KIMI_K2, "a <|tool_call_begin|>", Answer("a <|tool_call_begin|>")),
    "an unknown function of a section": (
        forms.KIMI_K2,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}",
        Answer("<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}"),
    ),
    "python": (forms.PHI4, "import functools\nfunctools.cache", Answer("import functools\nfunctools.cache")),
    "cut in the name": (forms.GLM47, "<tool_call>get_wea", Answer("<tool_call>get_wea")),
    "cut in a text": (
        forms.QWEN3_CODER,
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nK"\n</para',
        Answer(calls=[("get_weather", '{"city": "K\\"')]),
    ),
    "cut in a number": (
        forms.GLM47,
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>1",
        Answer(calls=[("get_weather", '{"days": ')]),
    ),
}


def parser(dialect: Dialect) -> AnswerParser:
    return AnswerParser(Manner(dialect, True), SCHEMAS)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (form, _, answer) in SAMPLES.items()
        if answer.calls == ONE and isinstance(form, Marked) and "opener" not in name
    ],
)
def test_a_form_writes_what_its_models_write(name: str) -> None:
    form, text, _ = SAMPLES[name]
    assert form.write("get_weather", VALUES) == text


@pytest.mark.parametrize("name", [name for name, (*_, answer) in SAMPLES.items() if answer.calls in (ONE, TWO)])
def test_a_call_that_is_cut_is_a_beginning_of_it(name: str) -> None:
    form, text, whole = SAMPLES[name]
    for at in range(text.index("Köln"), len(text)):
        cut = parser(form)
        answer = parsed(cut, [text[:at]])
        assert answer.content == whole.content
        for (called, arguments), expected in zip(answer.calls, whole.calls, strict=False):
            assert called == expected[0]
            assert expected[1].startswith(arguments)
        assert cut.cut is (answer.calls[-1] not in whole.calls)


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, text, _ in SAMPLES.values()][:4])
def test_texts_are_passed_on_as_they_arrive(form: Dialect, text: str) -> None:
    reader, said = parser(form), ""
    for char in text[: text.index(" Rhein")]:
        said += "".join(part.text for part in reader.feed(char) if part.kind is PartKind.ARGUMENTS)
    assert said == '{"city": "Köln \\"am' + "\\n" * (form is not forms.QWEN3_CODER), "a line feed may end the text"


TAGGED = [form for form, _ in forms._SHOWN if isinstance(form, Marked) and form.key]
NAMED = [form for form, _ in forms._SHOWN if isinstance(form, Marked) and not form.key]
TEXT = st.text(
    st.one_of(st.sampled_from('<>/"\\\n\t {}[]:0tea'), st.characters(exclude_categories=["Cc", "Cs"])), max_size=12
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KINDS: dict[str, Any] = {
    "string": TEXT,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(JSON, max_size=3),
    "object": st.dictionaries(TEXT, JSON, max_size=3),
}
NAME = st.from_regex(r"[A-Za-z_.$-][A-Za-z0-9_.$-]{0,8}", fullmatch=True)


@st.composite
def typed_calls(draw: st.DrawFn) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Draw a schema with a type for each parameter, declared or by reference, and arguments that follow it."""
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name in draw(st.lists(NAME, max_size=4, unique=True)):
        kind = draw(st.sampled_from(sorted(KINDS)))
        arguments[name] = draw(KINDS[kind])
        schema: dict[str, Any] = {"type": kind}
        match draw(st.integers(0, 4)):
            case 0:
                schema, definitions[name] = {"$ref": f"#/$defs/{name}"}, schema
            case 1 if kind not in ("null", "string"):
                schema = {"anyOf": [schema, {"type": "null"}]}
            case 2 if kind != "string":
                schema = {"allOf": [schema]}
            case 3 if isinstance(arguments[name], str | int | bool | None):
                schema = {"enum": [arguments[name]]}
        properties[name] = schema
    return {"type": "object", "properties": properties, "$defs": definitions}, arguments


@settings(max_examples=400, deadline=None)
@given(
    form=st.sampled_from(TAGGED + NAMED),
    call=typed_calls(),
    before=st.sampled_from(("", "So. <", "\n")),
    at=st.lists(st.integers(0, 1000), max_size=8),
    several=st.booleans(),
)
def test_what_a_form_writes_is_read_back(
    form: Marked, call: tuple[Mapping[str, Any], dict[str, Any]], before: str, at: list[int], several: bool
) -> None:
    schema, arguments = call
    before = before if form.anywhere else before.strip("So. <")
    if any(form.key and form.ends.strip() in str(value) for value in arguments.values() if isinstance(value, str)):
        return  # a text with the tag that ends it cannot be written
    text = form.write("f", arguments)
    if several:
        inner = text.removeprefix(form.opener + form.before).removesuffix(form.after + form.closer)
        listed = form.opener + form.before + form.between.join([inner] * 2) + form.after + form.closer
        text = form.between.join([text] * 2) if form.opens_each else listed
    for pieces in ([before + text], list(before + text), cuts(before + text, at)):
        answer = parsed(AnswerParser(Manner(form, True), {"f": schema}), pieces)
        assert [(name, json.loads(said)) for name, said in answer.calls] == [("f", arguments)] * (1 + several)
        assert answer.content.strip() == before.strip()


@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
@pytest.mark.parametrize("where", ["text", "list", "between"])
def test_what_has_no_end_takes_no_more_time_the_more_there_is(form: Marked, where: str) -> None:
    begun = form.write("get_weather", {} if where == "between" else {"city" if where == "text" else "spots": "@"})
    reader = parser(form)
    reader.feed(begun.partition("@")[0] if "@" in begun else begun.removesuffix(form.tail + form.after + form.closer))
    began = time.process_time()
    for _ in range(8_000):
        reader.feed('a< "' * 15 if where != "between" else " \n" * 30)
    assert time.process_time() - began < 2
