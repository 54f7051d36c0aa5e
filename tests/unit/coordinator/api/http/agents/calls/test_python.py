"""Calls in Python: what their arguments may be, compiled by the real grammar engine, and how they are read."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.http.agents.calls import arguments, forms
from coordinator.api.http.agents.calls.forms import Dialect, Marked
from coordinator.api.http.agents.calls.values import from_python
from coordinator.api.http.agents.parser import AnswerParser, Manner, PartKind
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams
from tests.unit.coordinator.api.http.agents.calls.test_arguments import LENIENT, ONE, allows, of
from tests.unit.coordinator.api.http.agents.calls.test_scanner import typed_calls
from tests.unit.coordinator.api.http.agents.test_parser import Answer, parsed
from tests.unit.coordinator.api.http.agents.test_tool_grammar import PYTHON, TARGETS, grammar_of

NAMES: dict[str, Any] = {"get_weather": {}, "get_time": {}, "f": {}}
LFM2, OLMO3, PYTHONIC = forms.LFM2, forms.OLMO3, forms.PYTHONIC
WEATHER = ("get_weather", '{"city": "Paris", "days": 3}')
# As the cards and templates of LFM2, LFM2.5, OLMo 3, Llama 3.2 and Llama 4 write calls.
SAMPLES: dict[str, tuple[Marked, str, Answer]] = {
    "lfm2": (LFM2, '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>', Answer(calls=[WEATHER])),
    "lfm2.5 between texts": (
        LFM2,
        "So.<|tool_call_start|>[get_weather(city='Paris', days=3), get_time()]<|tool_call_end|>Wait.",
        Answer("So.Wait.", calls=[WEATHER, ("get_time", "{}")]),
    ),
    "olmo3": (
        OLMO3,
        '<function_calls>get_weather(city="Paris", days=3)\nf(x=null, y=true)</function_calls>',
        Answer(calls=[WEATHER, ("f", '{"x": null, "y": true}')]),
    ),
    "olmo3 in lines": (
        OLMO3,
        "<function_calls>\nget_weather(city='Paris', days=3)\nget_time()\n</function_calls>",
        Answer(calls=[WEATHER, ("get_time", "{}")]),
    ),
    "llama": (
        PYTHONIC,
        "[get_weather(city='Paris', days=3), f(b='x')]",
        Answer(calls=[WEATHER, ("f", '{"b": "x"}')]),
    ),
    "llama with white space": (
        PYTHONIC,
        "\n[ f (\n a = 1 ,\n b = 'x' , ) ]",
        Answer(calls=[("f", '{"a": 1, "b": "x"}')]),
    ),
    "quotes and escapes": (
        PYTHONIC,
        r"""[f(a='it\'s "x"', b="it's \"x\"", c='\x41\u00e9\U0001f600\101\n\\', d='\d+\
', e='', g="\ud83d\ude00")]""",
        Answer(
            calls=[
                (
                    "f",
                    r'{"a": "it'
                    r"'s \"x\""
                    r'", "b": "it'
                    r"'s \"x\""
                    r'", "c": "A\u00e9\ud83d\ude00A\n\\", "d": "\\d+", "e": "", "g": "\ud83d\ude00"}',
                )
            ]
        ),
    ),
    "marks within texts": (
        LFM2,
        "<|tool_call_start|>[f(a=')]<|tool_call_end|>', b=[\"], x)\"])]<|tool_call_end|>",
        Answer(calls=[("f", '{"a": ")]<|tool_call_end|>", "b": ["], x)"]}')]),
    ),
    "lists and objects": (
        PYTHONIC,
        """[f(a=['x', "y'", {'k': None, "t": (1, -2.5e3)}, True,], b={}, c=[[False], null], d={'it"s': '\\''})]""",
        Answer(
            calls=[
                (
                    "f",
                    '{"a": ["x", "y\'", {"k": null, "t": [1, -2.5e3]}, true], "b": {}, "c": [[false], null], '
                    '"d": {"it\\"s": "\'"}}',
                )
            ]
        ),
    ),
    "no values of Python": (PYTHONIC, "[f(a=New York, b=NaN)]", Answer(calls=[("f", '{"a": "New York", "b": "NaN"}')])),
    # Broken, or no calls at all: nothing is lost.
    "a list": (PYTHONIC, '[1, "f", get(3)] x', Answer('[1, "f", get(3)] x')),
    "a link": (PYTHONIC, "[f](a=1)", Answer("[f](a=1)")),
    "a call within a text": (PYTHONIC, "See [f(a=1)]", Answer("See [f(a=1)]")),
    "an unknown function": (PYTHONIC, "[g(a=1)]", Answer("[g(a=1)]")),
    "by position": (PYTHONIC, "[f(1)]", Answer("[f(1)]")),
    "by position, later": (PYTHONIC, "[f(a=1, 2)] x", Answer("2)] x", calls=[("f", '{"a": 1}')])),
    "cut in the name": (LFM2, "<|tool_call_start|>[get_wea", Answer("<|tool_call_start|>[get_wea")),
    "cut in a keyword": (LFM2, "<|tool_call_start|>[f(ci", Answer("<|tool_call_start|>[f(ci")),
    "cut in a text": (LFM2, "<|tool_call_start|>[f(a='x\"\\", Answer(calls=[("f", '{"a": "x\\"')])),
    "cut in a list": (OLMO3, "<function_calls>f(a='x', b=[1, 'y\\", Answer(calls=[("f", '{"a": "x", "b": ')])),
}


def parser(form: Marked) -> AnswerParser:
    return AnswerParser(Manner(form, True), NAMES)


@pytest.mark.parametrize("form", PYTHON.values(), ids=PYTHON)
def test_texts_are_passed_on_as_they_arrive(form: Marked) -> None:
    text, reader, said = form.write("f", {"a": "Rhine"}), parser(form), ""
    for char in text[: text.index("ne")]:
        said += "".join(part.text for part in reader.feed(char) if part.kind is PartKind.ARGUMENTS)
    assert said == '{"a": "Rhi'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a'", "a"),
        ("[1, -2, 3.5, 1e3]", [1, -2, 3.5, 1e3]),
        ("{'a': True, \"b\": None, 'c': false}", {"a": True, "b": None, "c": False}),
        ("('x', ('y',),)", ["x", ["y"]]),
        (r"['True', \"(None,)\"]".replace("\\", ""), ["True", "(None,)"]),
        (r"['\'', '\"', '\\', '\t\b\f\r\a\v\0']", ["'", '"', "\\", "\t\b\f\r\a\v\0"]),
        ("['\\\n', '\n']", ["", "\n"]),
    ],
)
def test_values_become_json(text: str, value: Any) -> None:
    assert json.loads(from_python(text)) == value


@pytest.mark.parametrize("where", ["text", "list", "between"])
def test_what_has_no_end_takes_no_more_time_the_more_there_is(where: str) -> None:
    reader = parser(PYTHONIC)
    reader.feed("[f(a=" + {"text": "'", "list": "[", "between": "1,"}[where])
    began = time.process_time()
    for _ in range(8_000):
        reader.feed('a\\< "' * 15 if where != "between" else " \n" * 30)
    assert time.process_time() - began < 2


TEXT, UNIT = {"type": "string"}, {"type": "string", "enum": ["a", "it's"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False}
# A schema, values that follow it as they may be written, and others.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a text": (
        TEXT,
        ["''", '""', "'a\"\\''", '"a\'\\""', r"'\x41\u00e9\n'", "'\n'", "'é'"],
        ["a", "3", "None", "'", r"'\d'", r"'\ud83d'", "'a' 'b'"],
    ),
    "its length": ({**TEXT, "minLength": 1, "maxLength": 2}, ["'a'", r'"\x41é"'], ["''", "'abc'", '"abc"']),
    "its pattern, in JSON": ({**TEXT, "pattern": "^a+$"}, ['"aa"'], ['"b"', "'b'"]),
    "an integer": ({"type": "integer", "minimum": 1, "maximum": 12}, ["1", "12"], ["0", "1.5", "'1'", "True", "null"]),
    "a number": ({"type": "number"}, ["1", "-1.5e3"], ["'1'", "x"]),
    "a boolean": ({"type": "boolean"}, ["True", "False", "true", "false"], ["TRUE", "0", "'True'"]),
    "null": ({"type": ["integer", "null"]}, ["None", "null", "3"], ["'None'", "True"]),
    "one of texts": (UNIT, ["'a'", '"a"', '"it\'s"'], ["'b'", "a"]),
    "one of texts and numbers": ({"enum": ["1", 2, None, True]}, ["'1'", "2", "None", "True", "true"], ["1", "'2'"]),
    "a constant": ({"const": "a"}, ['"a"'], ["'b'", '"b"']),
    "one of several": ({"anyOf": [TEXT, {"type": "null"}]}, ["'a'", "None"], ["3"]),
    "a list": (
        {"type": "array", "items": UNIT},
        ["[]", "['a']", '[\'a\', "a","it\'s"]'],
        ["['b']", "['a' 'a']", "['a',]", "[1]"],
    ),
    "its length, in JSON": ({"type": "array", "items": TEXT, "maxItems": 1}, ["[]", '["a"]'], ['["a", "a"]']),
    "a list of lists": (
        {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}},
        ["[[True], [false, True], []]"],
        ["[True]"],
    ),
    "an object": (
        {
            "type": "object",
            "properties": {"x": UNIT, "y": {"type": "null"}},
            "required": ["y"],
            "additionalProperties": False,
        },
        ["{'x': 'a', 'y': None}", '{"x": "a","y":null}', "{'y': None}"],
        ["{}", "{'x': 'a'}", "{'y': 1}", "{'y': None, 'x': 'a'}", "{'y': None, 'z': 1}"],
    ),
    "an object with more": (
        {"type": "object", "properties": {"x": UNIT}, "additionalProperties": {"type": "integer"}},
        ["{}", "{'x': 'a', 'z': 1, \"b\": 2}", "{'z': 1}"],
        ["{'x': 3}", "{'z': 'a'}", "{'z': 1, 'x': 3}", r"{'\x78': 1}"],
    ),
    "by reference": ({"$ref": "#/$defs/Unit"}, ["'a'", '"a"'], ["'b'"]),
    "by a reference to itself": (
        {"$ref": "#/$defs/Node"},
        ["{}", "{'next': {\"next\": {'next': {}}}}"],
        ["{'next': 3}", "{'next': {'next': 3}}"],
    ),
    "all of several, in JSON": ({"allOf": [TEXT, {"minLength": 2}]}, ['"ab"'], ['"a"']),
    "of no type, in JSON": ({}, ['"a"', "3", "null", '{"a": [1]}'], ["a"]),
}


@pytest.mark.parametrize("form", PYTHON.values(), ids=PYTHON)
@pytest.mark.parametrize("name", CASES)
def test_values_follow_their_schema(name: str, form: Marked) -> None:
    schema, good, bad = CASES[name]
    tool = of(schema, **{"$defs": {"Unit": UNIT, "Node": NODE}})
    before, after = form.write("f", {"a": 0}).split("0")
    for value in good:
        assert allows(form, tool, before + value + after), value
        [(_, arguments)] = parsed(AnswerParser(Manner(form, True), {"f": tool}), [before + value + after]).calls
        assert json.loads(arguments)["a"] == json.loads(from_python(value))
    for value in bad:
        assert not allows(form, tool, before + value + after), value


@pytest.mark.parametrize("key", ["a b", "a=", "", "'"])
def test_a_name_that_python_does_not_hold_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match=r"does not compile: f: a parameter named .* of the form lfm2"):
        allows(LFM2, {"properties": {key: {}}}, "")
    for name in ("from", "user-id", "a.b"):  # of Python's own, and not of Python at all
        tool = {"properties": {name: {"type": "integer"}}, "additionalProperties": False}
        text = LFM2.write("f", {name: 3})
        assert allows(LFM2, tool, text)
        assert parsed(parser(LFM2), [text]).calls == [("f", json.dumps({name: 3}))]


def test_a_strict_tool_is_refused_for_what_holds_nothing() -> None:
    for schema in (of(TEXT, minProperties=1), of({**TEXT, "format": "nonsense"})):
        with pytest.raises(InvalidRequest, match=r"does not compile: f: .*(minProperties|nonsense)"):
            allows(LFM2, schema, "", strict=True)
    assert allows(
        LFM2, of({**TEXT, "format": "date"}), LFM2.write("f", {"a": "x"}).replace("'x'", '"2026-11-30"'), strict=True
    )


@settings(max_examples=150, deadline=None)
@given(form=st.sampled_from([*PYTHON.values()]), call=typed_calls())
def test_what_follows_a_schema_is_allowed(form: Marked, call: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """As JSON has it: schemas that are held in JSON alone take no single quotes."""
    schema, arguments = call
    if any(isinstance(it, float | int) and abs(it) > 1e15 for it in arguments.values()):
        return  # as constants
    closed = schema | {"required": list(schema["properties"]), "additionalProperties": False}
    text = OLMO3.write("f", arguments).removeprefix(OLMO3.opener).removesuffix(OLMO3.closer)
    text = form.opener + form.before + text + form.after + form.closer
    assert allows(form, closed, text), text


@pytest.mark.parametrize("more", [{"type": ["object"] * 2}, {"required": ["b", "c"]}], ids=["types", "names"])
def test_schemas_that_repeat_themselves_at_each_depth_are_written_once(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written for each type and name anew, forty of them would take years, and the coordinator would stand still."""
    written, write = list[Any](), arguments._PythonRules._value
    monkeypatch.setattr(arguments._PythonRules, "_value", lambda self, it: (written.append(it), write(self, it))[1])
    schema: dict[str, Any] = {"type": "integer"}
    for depth in range(1, 41):
        schema = {"type": "object", "additionalProperties": schema, **more}
        if depth == 5:
            grammar = grammar_of({"f": of(schema)}, Manner(LFM2, True), TARGETS[False], **ONE)
            assert len(grammar.text) < 4_000, "and not 40,000"
            assert len(written) <= 2 * depth + 1, "and not 364"
    before, after = LFM2.write("f", {"a": 0}).split("0")
    assert not allows(LFM2, of(schema), before + "3" + after)


def test_calls_of_lfm2_are_in_python_where_its_prompt_asks_for_json() -> None:
    """Its card has the other form, too. The grammar holds it to the one that is read."""
    for tokens in (False, True):
        call = LFM2.write("f", {"a": "x"})
        assert allows(LFM2, of(TEXT), call, tokens=tokens)
        assert not allows(
            LFM2, of(TEXT), call.replace("f(a='x')", '{"name": "f", "arguments": {"a": "x"}}'), tokens=tokens
        )


@pytest.mark.parametrize("schema", [{"enum": []}, {"type": "string", "enum": []}, {"anyOf": []}, {"type": []}])
@pytest.mark.parametrize("form", [forms.HERMES, *PYTHON.values()], ids=lambda form: form.name)
def test_a_parameter_that_can_have_no_value_is_refused(form: Dialect, schema: dict[str, Any]) -> None:
    """The forms in Python took nothing at all for a value: `f(a=)`."""
    tool = {"type": "object", **LENIENT, **of(schema)}
    grammar = grammar_of({"f": tool}, Manner(form, True), TARGETS[False], **ONE)
    with pytest.raises(InvalidRequest, match=r"does not compile: f: .*Unsatisfiable schema"):
        TARGETS[False].grammars.compile(SamplingParams(grammar=grammar))
