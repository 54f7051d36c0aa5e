"""What arguments between tags may be, compiled by the real grammar engine: the same that their schema takes as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.api.http.agents.calls.forms import Marked
from coordinator.api.http.agents.calls.values import wanted
from coordinator.api.http.agents.parser import AnswerParser, Manner
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams
from tests.unit.coordinator.api.http.agents.calls.test_scanner import typed_calls
from tests.unit.coordinator.api.http.agents.test_parser import parsed
from tests.unit.coordinator.api.http.agents.test_tool_grammar import TAGGED, TARGETS, grammar_of

ONE: dict[str, Any] = {"required": True, "parallel": False}
LENIENT = {"x-guidance": {"lenient": True}}
DEFINED = {"Unit": {"enum": ["celsius", "kelvin"]}, "Node": {"type": "object", "properties": {"next": {"$ref": "#"}}}}


def allows(form: Marked, schema: Mapping[str, Any], text: str, *, tokens: bool = False, strict: bool = False) -> bool:
    target = TARGETS[tokens]
    tools = {"f": {"type": "object", **({} if strict else LENIENT), **schema}}
    grammar = grammar_of(tools, Manner(form, True), target, required=True, parallel=False)
    guide, ids = target.grammars.compile(SamplingParams(grammar=grammar)), list(target.encode(text))
    if guide.count_allowed(ids) < len(ids):
        return False
    guide.advance(ids)
    return guide._complete or guide.count_allowed([target.tokenizer.eos_token_id]) == 1


def of(schema: Any, *, further: Any = False, required: bool = True, **more: Any) -> dict[str, Any]:
    """Return the schema of a tool with one parameter."""
    return {"properties": {"a": schema}, "required": ["a"] * required, "additionalProperties": further, **more}


CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "a text": (of({"type": "string"}), ["", "3", "null", " \n<b> é", "{"], []),
    "its length": (of({"type": "string", "minLength": 2, "maxLength": 4}), ["ab", "é\n <"], ["", "a", "abcde"]),
    "an integer": (of({"type": "integer", "minimum": 1, "maximum": 12}), [1, 12], [0, 13, 1.5, "1x", "", None]),
    "a boolean": (of({"type": "boolean"}), [True, False], ["True", "", 0]),
    "one of texts": (of({"enum": ["a", "ab"]}), ["a", "ab"], ["", "b", "abc", 3]),
    "one of texts, or null": (of({"type": ["string", "null"], "enum": ["a", None]}), ["a", None], ["b", ""]),
    "a constant": (of({"const": 3}), [3], [4, "a"]),
    "one of texts and numbers": (of({"enum": ["1", 2]}), ["1", 2], [3, "x"]),
    "any text, or null": (of({"anyOf": [{"type": "string"}, {"type": "null"}]}), ["a", None, ""], []),
    "an integer, or null": (of({"type": ["integer", "null"]}), [3, None], ["a", True]),
    "a list of integers": (of({"type": "array", "items": {"type": "integer"}}), [[], [1, 2]], [["a"], {}, "", 1]),
    "a text, or a list": (
        of({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
        ["a", ["a", "]"], 3],
        [[1]],
    ),
    "an object": (of({"type": "object", "properties": {"x": {"type": "null"}}}), [{"x": None}], [{"x": 1}, []]),
    "by reference": (of({"$ref": "#/$defs/Unit"}, **{"$defs": DEFINED}), ["kelvin"], ["k", 3]),
    "a reference to the whole": (
        of({"$ref": "#/$defs/Node"}, required=False, **{"$defs": DEFINED}),
        [{"next": {"a": {"next": {}}}}],
        [{"next": {"b": 3}}, {"next": 3}],
    ),
    "references within": (
        of({"type": "array", "items": {"$ref": "#/$defs/Unit"}}, **{"$defs": DEFINED}),
        [["kelvin", "celsius"]],
        [["x"]],
    ),
    "all of one": (of({"allOf": [{"$ref": "#/$defs/Unit"}], "default": "x"}, **{"$defs": DEFINED}), ["kelvin"], ["x"]),
    "all of several": (of({"allOf": [{"type": "integer"}, {"minimum": 3}]}), [3], [2, "a"]),
    "itself": (
        of({"$ref": "#/$defs/X"}, **{"$defs": {"X": {"anyOf": [{"$ref": "#/$defs/X"}, {"const": 1}]}}}),
        [1],
        [2],
    ),
    "of no type": (of({"description": "Anything."}), ["a", 3], []),
}


MARKED_APART = {"a text, or a list": [3], "of no type": [3]}  # numbers, where the mark says what is a text


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize("name", CASES)
def test_values_follow_their_schema(name: str, form: Marked) -> None:
    schema, good, bad = CASES[name]
    for value in good:
        if not (form.other and value in MARKED_APART.get(name, [])):
            assert allows(form, schema, form.write("f", {"a": value})), value
    for value in bad:
        assert not allows(form, schema, form.write("f", {"a": value})), value


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize(
    ("schema", "lacked"),
    [
        (of({"type": "string", "format": "date"}), "format"),
        (of({"anyOf": [{"type": "string", "pattern": "a"}, {"type": "null"}]}), "pattern"),
        (of({"type": "string"}, minProperties=1), "minProperties"),
        (of({"$ref": "#/$defs/X"}, **{"$defs": {"X": {"type": "string", "format": "uuid"}}}), "format"),
    ],
)
def test_what_holds_nothing_is_refused_of_strict_tools_only(form: Marked, schema: dict[str, Any], lacked: str) -> None:
    text = form.write("f", {"a": "x"})
    assert allows(form, schema, text)
    with pytest.raises(InvalidRequest, match=f"does not compile: f: {lacked} "):
        allows(form, schema, text, strict=True)


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
def test_strict_tools_may_have_what_is_held(form: Marked) -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "description": "Does it.",
        "properties": {
            "a": {"type": "string", "title": "A", "minLength": 1},
            "b": {"type": ["integer", "null"], "minimum": 1},
            "c": {"type": "array", "items": {"type": "string", "format": "date"}},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    }
    assert allows(form, schema, form.write("f", {"a": "x", "b": None, "c": ["2026-11-30"]}), strict=True)
    assert not allows(form, schema, form.write("f", {"a": "x", "b": None, "c": ["today"]}), strict=True)
    with pytest.raises(InvalidRequest, match="f: "):
        allows(form, of({"type": "array", "items": {"type": "string", "format": "nonsense"}}), "", strict=True)


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [], "required": "a"},
        {"properties": {"a": 3}, "required": [4, "a"], "additionalProperties": 3},
        {"$ref": 3, "x-guidance": 5},
        {"properties": {"a": {"$ref": 3, "enum": 4, "anyOf": "x"}}, "$defs": []},
    ],
)
def test_a_schema_that_is_none_is_a_text_or_refused(form: Marked, schema: dict[str, Any]) -> None:
    text = form.write("f", {"a": "x"})
    with suppress(InvalidRequest):  # of the grammar engine, for what it does not take either
        assert allows(form, schema, text)
    assert parsed(AnswerParser(Manner(form, True), {"f": schema}), [text]).calls == [("f", '{"a": "x"}')]


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
def test_many_references_take_no_time(form: Marked) -> None:
    """Each expanded where it stands, ten references to ten references would take hours."""
    wide = {f"X{at}": {"anyOf": [{"$ref": f"#/$defs/X{other}"} for other in range(20)]} for at in range(20)}
    assert wanted({"$ref": "#/$defs/X0"}, {"$defs": wide})[0] == {"string"}
    assert allows(
        form, of({"$ref": "#/$defs/X0"}, **{"$defs": wide | {"X19": {"type": "string"}}}), form.write("f", {"a": ""})
    )


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
def test_a_hundred_tools_have_room(form: Marked, tokens: bool) -> None:
    """Each parameter has the marks around it: by name, they take no more of the 64 KiB than as JSON."""
    types: list[Any] = [{"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}]
    tool = {"type": "object", "properties": {f"parameter_{at}": types[at % 3] for at in range(6)}, **LENIENT}
    tools, target = {f"tool_{at}": tool | {"additionalProperties": False} for at in range(100)}, TARGETS[tokens]
    grammar = grammar_of(tools, Manner(form, True), target, required=False, parallel=True)
    assert len(grammar.text.encode()) < 64 * 1024
    target.grammars.compile(SamplingParams(grammar=grammar))


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
def test_parameters_have_no_more_definitions_than_they_refer_to(form: Marked) -> None:
    """With all of them at each parameter, eight such tools were larger than a grammar may be."""
    models: dict[str, Any] = {
        f"Model{at}": {"properties": {f"f{at}_{n}": {"type": "string"} for n in range(10)}} for at in range(6)
    }
    models |= {"Outer": {"properties": {"inner": {"$ref": "#/$defs/Model0"}}, "additionalProperties": False}}
    fields = {f"a{at}": {"$ref": f"#/$defs/Model{at}"} for at in range(6)} | {"a": {"$ref": "#/$defs/Outer"}}
    tool = {"type": "object", "properties": fields, "$defs": models, "additionalProperties": False}
    grammar = grammar_of({f"f{at}": tool for at in range(8)}, Manner(form, True), TARGETS[False], **ONE)
    assert len(grammar.text.encode()) < 32 * 1024
    assert allows(form, tool, form.write("f", {"a": {"inner": {"f0_1": "x"}}}))
    assert not allows(form, tool, form.write("f", {"a": {"inner": {"f0_1": 3}}}))


def repeated(many: int) -> dict[str, dict[str, Any]]:
    """Return schemas in which references stand for far more than they are."""
    numbers = {"enum": [*range(many)]}
    wide = {f"X{at}": {"type": "array", "items": {"$ref": "#/$defs/Y"}} for at in range(many)}
    chain = {f"X{at}": {"$ref": f"#/$defs/X{at + 1}"} for at in range(many)}
    each = {f"a{at}": {"$ref": f"#/$defs/X{at}"} for at in range(many)}
    same = {f"a{at}": {"$ref": "#/$defs/X"} for at in range(many)}
    return {
        "lists": {"properties": each, "$defs": wide | {"Y": numbers}},
        "texts": {"properties": same, "$defs": {"X": {"enum": [*map(str, range(many))]}}},
        "numbers": {"properties": same, "$defs": {"X": {"anyOf": [{"type": "string"}, numbers]}}},
        "a chain": {"properties": each, "$defs": chain},
    }


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"properties": {"": {"type": "integer"}}}, "a parameter without a name"),
        (of({"type": "string", "minLength": 5, "maxLength": 2}), "minLength 5 with maxLength 2"),
        (of({"type": "string", "minLength": -1}), "minLength -1 with maxLength None"),
        (of({"type": "string", "minLength": 2_000}), "minLength 2000 with maxLength None"),
    ],
)
def test_what_no_rule_can_be_made_of_is_refused_by_name(form: Marked, schema: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequest, match=f"does not compile: f: {what} cannot be held in calls of the form "):
        allows(form, schema, "")


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
def test_a_text_that_has_its_tag_is_refused_by_name_and_no_length_is_too_large(form: Marked) -> None:
    tag = form.ends.strip()
    with pytest.raises(InvalidRequest, match=f"does not compile: f: a text with {tag} cannot be held in calls"):
        allows(form, of({"enum": ["a", f"b{tag}"]}), "")
    for most in (100_000, 10**12):
        assert allows(form, of({"type": "string", "maxLength": most}), form.write("f", {"a": "x"}))


@pytest.mark.parametrize("form", [it for it in TAGGED.values() if not it.other], ids=lambda form: form.name)
def test_a_text_that_could_be_a_list_does_not_begin_like_one(form: Marked) -> None:
    schema = of({"type": ["string", "array"], "items": {"type": "string"}})
    assert not allows(form, schema, form.write("f", {"a": " [1]"}))
    assert allows(form, schema, form.write("f", {"a": "x [1]"}))


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize("name", repeated(0))
def test_references_that_stand_for_much_are_refused_at_once(form: Marked, name: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        grammar_of({"f": repeated(3_000)[name]}, Manner(form, True), TARGETS[False], **ONE)
    assert time.process_time() - began < 2


def test_a_parameter_with_a_line_feed_in_its_name_excludes_no_others() -> None:
    schema = {"properties": {"a\nb": {"type": "integer"}}}
    assert allows(TAGGED["glm47"], schema, TAGGED["glm47"].write("f", {"c": "x"}))


@settings(max_examples=100, deadline=None)
@given(form=st.sampled_from([*TAGGED.values()]), call=typed_calls())
def test_what_follows_a_schema_is_allowed(form: Marked, call: tuple[dict[str, Any], dict[str, Any]]) -> None:
    schema, arguments = call
    assume(form.ends.strip() not in form.body(arguments).replace(form.ends, ""))
    assume(not any(isinstance(it, float | int) and abs(it) > 1e15 for it in arguments.values()))  # as constants
    closed = schema | {"required": list(schema["properties"]), "additionalProperties": False}
    assert allows(form, closed, form.write("f", arguments)), form.write("f", arguments)
