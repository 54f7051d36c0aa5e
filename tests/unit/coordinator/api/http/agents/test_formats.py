"""Final answers in a format beside tools: an answer is one or the other, and the parser knows which."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from coordinator.api.http.agents.calls.forms import HERMES, Dialect
from coordinator.api.http.agents.parser import AnswerParser, Manner, PartKind
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import Grammar, SamplingParams
from outrider.speculation.grammar import GrammarMatcher
from tests.unit.coordinator.api.http.agents.test_tool_grammar import ALL, DIALECTS, TARGETS, TOOLS, grammar_of

DAYS: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
OBJECT = Grammar(json_object=True)
SCHEMA = Grammar(json_schema=json.dumps(DAYS))
REGEX = Grammar(regex="(yes|no|[a-z]{1,3}/[0-9])[.!]?")
ANY = Grammar(regex="(.|\n)*")
FORMATS = {"object": OBJECT, "schema": SCHEMA, "regex": REGEX}


def guide(tokens: bool, dialect: Dialect, answer: Grammar | None, **choice: Any) -> GrammarMatcher:
    target, tools = TARGETS[tokens], choice.pop("tools", TOOLS)
    manner = Manner(dialect, True, choice.pop("thinks", False), choice.pop("thinking", False))
    given = {"required": False, "parallel": True} | choice
    return target.grammars.compile(SamplingParams(grammar=grammar_of(tools, manner, target, answer=answer, **given)))


def allows(tokens: bool, dialect: Dialect, answer: Grammar | None, text: str, **choice: Any) -> bool:
    """Whether this is a whole answer."""
    found, ids = guide(tokens, dialect, answer, **choice), list(TARGETS[tokens].encode(text))
    if found.count_allowed(ids) < len(ids):
        return False
    found.advance(ids)
    return found._complete or found.count_allowed([TARGETS[tokens].tokenizer.eos_token_id]) == 1


def parsed(dialect: Dialect, pieces: Any, thinks: bool = False) -> tuple[str, str, list[list[str]]]:
    """The reasoning, the content and the calls of an answer."""
    parser = AnswerParser(Manner(dialect, True, thinks), tuple(TOOLS), formatted=True)
    texts, calls = dict.fromkeys(PartKind, ""), []
    for part in [part for piece in pieces for part in parser.feed(piece)] + parser.end():
        texts[part.kind] += part.text
        if part.kind is PartKind.CALL:
            calls.append([part.text, ""])
        elif part.kind is PartKind.ARGUMENTS:
            calls[-1][1] += part.text
    return texts[PartKind.REASONING], texts[PartKind.CONTENT], calls


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", ALL)
def test_an_answer_is_calls_or_follows_the_format(name: str, tokens: bool) -> None:
    dialect = ALL[name]
    answers = {"object": '{"days": "x"}', "schema": '{"name": "get_time", "days": 3}', "regex": "ab/1!"}
    good, bad = dialect.write("get_weather", {"city": "Köln"}), dialect.write("get_weather", {"n": 3})
    for kind, wanted in FORMATS.items():
        assert allows(tokens, dialect, wanted, good)
        assert not allows(tokens, dialect, wanted, bad)
        assert allows(tokens, dialect, wanted, answers[kind])
        assert not any(allows(tokens, dialect, wanted, text) for text in ("A text.", "", " "))
        assert not allows(tokens, dialect, wanted, f"A text.{good}"), "nothing before calls"
        assert not allows(tokens, dialect, wanted, answers[kind], required=True)
        assert allows(tokens, dialect, wanted, good, required=True)
    assert not allows(tokens, dialect, SCHEMA, '{"days": "x"}')
    assert not allows(tokens, dialect, REGEX, " yes")


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", ALL)
def test_thoughts_come_before_both(name: str, tokens: bool) -> None:
    dialect = ALL[name]
    call = dialect.write("get_time", {})
    for text in ('{"days": 3}', call):
        for blank in ("", "\n\n"):
            assert allows(tokens, dialect, SCHEMA, f"<think>Hm {{.</think>{blank}{text}", thinks=True)
            assert allows(tokens, dialect, SCHEMA, f"Hm.</think>{blank}{text}", thinks=True, thinking=True)
    whole = '<think>Hm.</think>\n\n{"days": 3}'
    assert parsed(dialect, whole, thinks=True) == parsed(dialect, [whole], thinks=True) == ("Hm.", '{"days": 3}', [])
    assert parsed(dialect, f"<think>Hm.</think>\n\n{call}", thinks=True) == ("Hm.", "", [["get_time", "{}"]])


@pytest.mark.parametrize("name", ALL)
def test_no_answer_can_be_taken_for_a_call(name: str) -> None:
    """Not even one whose format allows the text of a call with other arguments."""
    dialect = ALL[name]
    bad = dialect.write("get_weather", {"n": 3})
    assert not allows(False, dialect, ANY, bad)
    assert not allows(False, dialect, ANY, f"<think>{bad}")
    assert allows(False, dialect, ANY, "A text: " + bad) is True
    assert parsed(dialect, ["A text: " + bad]) == ("", "A text: " + bad, [])
    inner = json.dumps({"text": bad}, ensure_ascii=False)
    assert allows(False, dialect, OBJECT, inner)
    assert parsed(dialect, inner) == parsed(dialect, [inner]) == ("", inner, [])
    if dialect.bare:
        assert not allows(False, dialect, OBJECT, '{"arguments": {}, "name": "get_time"}')
        both = {"properties": {"name": {"type": "string"}, dialect.arguments: {"type": "object"}}}
        needed = Grammar(json_schema=json.dumps({"type": "object", **both, "required": [dialect.arguments]}))
        with pytest.raises(InvalidRequest, match="nsatisfiable"):
            guide(False, dialect, needed)
    own = Grammar(json_schema=json.dumps({"allOf": [DAYS, {"properties": {"days": {"maximum": 5}}}]}))
    assert [allows(False, dialect, own, json.dumps({"days": days})) for days in (5, 6)] == [True, False]
    with pytest.raises(InvalidRequest, match="does not compile"):
        guide(False, dialect, Grammar(json_schema='{"allOf": 3}'))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ALL)
def test_whatever_is_drawn_is_valid(name: str, kind: str) -> None:
    """Answers drawn at random from the masks are read as what they are, in pieces too."""
    dialect, seen = ALL[name], {"calls": 0, "content": 0}
    for seed in range(40):
        begun = ("", dialect.opener or dialect.head("get_weather"), "", dialect.opener or '{"name": "get_')[seed % 4]
        text = _drawn(guide(False, dialect, FORMATS[kind]), random.Random(seed), begun)
        if text is None:
            continue
        reasoning, content, calls = parsed(dialect, [text])
        assert parsed(dialect, text) == (reasoning, content, calls)
        assert not reasoning
        assert bool(content) is not bool(calls), text
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), TOOLS[called])
        if content:
            assert content == text.lstrip()
            assert kind != "regex" or re.fullmatch(REGEX.regex, content)
            assert kind == "regex" or isinstance(json.loads(content), dict)
            assert kind != "schema" or jsonschema.validate(json.loads(content), DAYS) is None
        seen["calls" if calls else "content"] += 1
    assert min(seen.values()) >= 2, seen


def _drawn(found: GrammarMatcher, rng: random.Random, begun: str, most: int = 400) -> str | None:
    """Draw bytes that the grammar allows, ends of strings and objects rather than others; None: it has no end yet."""
    target = TARGETS[False]
    end, ids = target.tokenizer.eos_token_id, list(target.encode(begun))
    found.advance(ids)
    for _ in range(most):
        [mask] = found.allowed([()], len(target.tokenizer))
        allowed = mask.nonzero()[0].tolist()
        ending = [one for one in allowed if one == end or target.decode([one]) in ('"', "}", "]")]
        chosen = rng.choice(ending if ending and rng.random() < 0.5 else allowed)
        if chosen == end:
            break
        ids.append(chosen)
        if found.advance([chosen]) is not None:
            break
    else:
        return None
    return target.decode(ids)


@pytest.mark.parametrize("name", ALL)
def test_references_of_a_schema_hold(name: str) -> None:
    """They begin at the schema's root, which lies inside a call."""
    dialect, target = ALL[name], TARGETS[False]
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}, "leaf": {"$ref": "#/$defs/leaf"}},
        "additionalProperties": False,
        "$defs": {"leaf": {"enum": [{"$ref": "#"}, 1]}},
    }
    manner = Manner(dialect, True)
    for answer in (None, SCHEMA):
        grammar = grammar_of({"plant": tree}, manner, target, required=False, parallel=True, answer=answer)
        for arguments, good in (
            ({"kids": [{"kids": [], "leaf": 1}], "leaf": {"$ref": "#"}}, True),
            ({"kids": [{"leaf": 2}]}, False),
            ({"kids": [{"name": "plant"}]}, False),
        ):
            ids = list(target.encode(dialect.write("plant", arguments)))
            found = target.grammars.compile(SamplingParams(grammar=grammar))
            assert (found.count_allowed(ids) == len(ids)) is good, (answer, arguments)


def test_a_hermes_marker_in_an_answer_is_content() -> None:
    text = '{"days": 1, "name": "<tool_call>\\n{}"}'
    assert parsed(HERMES, text) == ("", text, [])


WHOLE = {"X": {"type": "integer"}, "const": {"type": "object", "properties": {"b": {"$ref": "#/$defs/X"}}}}
REFERRING: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "a property named like a field of values": ({"default": {"$ref": "#/$defs/X"}}, {"default": 1}, {"default": "x"}),
    "a definition named like one": ({"a": {"$ref": "#/$defs/const"}}, {"a": {"b": 1}}, {"a": {"b": "x"}}),
    "a property named like a reference": ({"$ref": {"type": "integer"}}, {"$ref": 1}, {"$ref": "x"}),
    "a value that looks like one": ({"a": {"enum": [{"$ref": "#"}, 1]}}, {"a": {"$ref": "#"}}, {"a": 2}),
}


@pytest.mark.parametrize("name", ["llama3", "json"])
@pytest.mark.parametrize("case", REFERRING)
def test_references_of_a_tool_survive_the_move_into_a_call(case: str, name: str) -> None:
    properties, good, bad = REFERRING[case]
    dialect, schema = DIALECTS[name], {"type": "object", "properties": properties, "$defs": WHOLE}
    for more in ({}, {"$id": "https://x.example/y", "$schema": "https://json-schema.org/draft/2020-12/schema"}):
        tools = {"f": schema | more}
        assert allows(False, dialect, OBJECT, dialect.write("f", good), tools=tools)
        assert not allows(False, dialect, OBJECT, dialect.write("f", bad), tools=tools)


@pytest.mark.parametrize("answer", [None, OBJECT], ids=["text", "object"])
@pytest.mark.parametrize("name", DIALECTS)
def test_a_schema_s_own_options_leave_the_usual_white_space(name: str, answer: Grammar | None) -> None:
    """A model could fill an answer with blanks."""
    dialect = DIALECTS[name]
    good = dialect.write("f", {"a": 1})
    for options, blanks in (({"coerce_one_of": True}, 1), ({"whitespace_pattern": ""}, 0)):
        tools = {"f": {"x-guidance": options, "type": "object", "properties": {"a": {"type": "integer"}}}}
        for count in (0, 1, 2, 100) if blanks or answer is None else ():  # else they are those of the whole call
            text = good.replace('"a": 1', f'"a":{" " * count}1')
            assert allows(False, dialect, answer, text, tools=tools) is (count <= blanks), (options, count)
    with pytest.raises(InvalidRequest):
        guide(False, dialect, answer, tools={"f": {"x-guidance": 5, "type": "object"}})


@pytest.mark.parametrize("name", ALL)
def test_parts_of_a_recursive_format_may_have_fields_as_a_call_has(name: str) -> None:
    """Only the whole answer must not look like a call."""
    fields = {"arguments": {"type": "integer"}, "parameters": {"type": "integer"}, "next": {"$ref": "#"}}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/node",
        "type": "object",
        "properties": fields,
        "additionalProperties": False,
    }
    answer, dialect = Grammar(json_schema=json.dumps(schema)), ALL[name]
    for field in ("arguments", "parameters"):
        assert allows(False, dialect, answer, f'{{"next": {{"next": {{"{field}": 1}}}}}}')
        assert allows(False, dialect, answer, f'{{"{field}": 1}}') is not dialect.bare
    assert not allows(False, dialect, answer, '{"next": {"days": 1}}')
