"""One mapping by fields for records, request bodies, flags and messages: what goes in comes out, names may differ."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.protocol.fieldwise import KEY, from_plain, to_plain


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Inside:
    text: str = ""


@dataclass(frozen=True)
class Whole:
    many: tuple[int, ...] = ()
    biases: Mapping[int, float] = field(default_factory=dict)
    colour: Colour | None = None
    inside: Inside | None = None
    several: tuple[Inside, ...] = ()
    renamed: Inside = field(default=Inside(), metadata={KEY: "other"})
    hidden: int = field(default=0, metadata={KEY: ""})


VALUES = [Whole(), Whole((1, 2), {3: 1.5}, Colour.BLUE, Inside("a"), renamed=Inside("b"))]


@pytest.mark.parametrize("value", VALUES)
def test_what_is_written_as_json_is_read_again(value: Whole) -> None:
    written = json.loads(json.dumps(to_plain(value)))
    assert list(written) == ["many", "biases", "colour", "inside", "several", "other"]
    assert from_plain(Whole, written) == value


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, Whole()),
        ({"since_2030": 1, "hidden": 7, "renamed": {"text": "x"}}, Whole()),
        ({"colour": "red"}, Whole(colour=Colour.RED)),
        ({"colour": 2}, Whole(colour=Colour.BLUE)),
        ({"biases": {"3": 1}}, Whole(biases={3: 1.0})),
        ({"several": [{"text": "a"}]}, Whole(several=(Inside("a"),))),
        ({"inside": Inside("a"), "many": [1]}, Whole((1,), inside=Inside("a"))),
    ],
)
def test_what_others_write_is_read(given: dict[str, Any], wanted: Whole) -> None:
    assert from_plain(Whole, given) == wanted


@pytest.mark.parametrize("given", [{"colour": "green"}, {"many": 5}, {"biases": [[1]]}, {"inside": 5}])
def test_what_cannot_be_read_is_an_error(given: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_plain(Whole, given)
