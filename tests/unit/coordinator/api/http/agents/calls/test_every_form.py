"""What holds for calls in every form: between marks, between tags and in Python."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.http.agents.calls.forms import Dialect, Marked
from coordinator.api.http.agents.parser import AnswerParser, Manner
from tests.unit.coordinator.api.http.agents.calls import test_python, test_scanner
from tests.unit.coordinator.api.http.agents.calls.test_arguments import allows
from tests.unit.coordinator.api.http.agents.test_parser import Answer, cuts, parsed
from tests.unit.coordinator.api.http.agents.test_tool_grammar import PYTHON, TAGGED

# The functions that are known, a form, a text in it, and how it is read.
Sample = tuple[Collection[str], Dialect, str, Answer]
SAMPLES: dict[str, Sample] = {
    **{f"marks: {name}": (test_scanner.SCHEMAS, *it) for name, it in test_scanner.SAMPLES.items()},
    **{f"python: {name}": (test_python.NAMES, *it) for name, it in test_python.SAMPLES.items()},
}
# With a value that a parameter without a type may have as each form writes it: Python holds it in JSON, tags as a text.
FORMS: dict[str, tuple[Marked, Any]] = {
    **{name: (form, "y") for name, form in TAGGED.items()},
    **{name: (form, 4) for name, form in PYTHON.items()},
}


def read(name: str, pieces: list[str]) -> Answer:
    known, form, _, _ = SAMPLES[name]
    return parsed(AnswerParser(Manner(form, True), known), pieces)


@pytest.mark.parametrize("name", SAMPLES)
def test_sample(name: str) -> None:
    *_, text, expected = SAMPLES[name]
    assert read(name, [text]) == expected
    assert read(name, list(text)) == expected, "character by character"
    for at in range(len(text)):
        assert read(name, [text[:at], text[at:]]) == expected, text[:at]


@settings(max_examples=600, deadline=None)
@given(name=st.sampled_from(sorted(SAMPLES)), at=st.lists(st.integers(0, 1000), max_size=6))
def test_pieces_change_nothing(name: str, at: list[int]) -> None:
    *_, text, expected = SAMPLES[name]
    assert read(name, cuts(text, at)) == expected


@pytest.mark.parametrize(("form", "untyped"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
def test_parameters_are_those_of_the_schema(form: Marked, untyped: Any, tokens: bool) -> None:
    schema: dict[str, Any] = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "ab": {}}}
    closed = schema | {"required": ["a"], "additionalProperties": False}
    open_ = schema | {"required": ["a", "z"], "additionalProperties": {"type": "integer"}}

    def takes(of_: dict[str, Any], **given: Any) -> bool:
        return allows(form, of_, form.write("f", given), tokens=tokens)

    assert takes(closed, a="x")
    assert takes(closed, a="x", b=3)
    assert takes(closed, a="x", ab=untyped)
    assert takes(closed, a="x", b=3, ab=untyped)
    assert not takes(closed), "a is required"
    assert not takes(closed, b=3)
    assert not takes(closed, b=3, a="x"), "they come in their order"
    assert not takes(closed, a="x", a_b=untyped)
    assert not takes(closed, a="x", b="y")
    assert takes(open_, a="x", z=3, more=4, most=5)
    assert not takes(open_, a="x", b=3), "z is required"
    assert not takes(open_, a="x", z=3, more="y")
    assert not takes(open_, a="x", z=3, b=4), "a declared one in its place only"
    assert takes(schema, zip=untyped), "without a rule for further ones"
    assert takes(schema), "none is required"
    assert takes(schema | {"additionalProperties": False}, b=3)
    assert takes({"$ref": "#/$defs/f", "$defs": {"f": closed}}, a="x", b=3)
    assert not takes({"$ref": "#/$defs/f", "$defs": {"f": closed}}, b=3)
