"""Formats of final answers where tools can be called too. An answer that follows one is never taken for a call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from coordinator.api.http.agents.dialects import THOUGHTS, Dialect
from outrider.protocol.sampling_params import Grammar
from outrider.speculation.grammar import CONSTANTS, NAMED, WHITESPACE

_ESCAPED, _FOREIGN = re.compile(r"\\.|/|\n", re.DOTALL), re.compile(r'"\$ref": "[^#]')
_NOTES = ("$comment", "default", "description", "examples", "title")
# Where calls have no opener, an object with a field of arguments could be one.
_NO_CALL = [{"$ref": "#/$defs/answer"}, {"properties": {"arguments": False, "parameters": False}}]


def rule_of(answer: Grammar, dialect: Dialect) -> str:
    """Return the lines of the rule `answer`: texts of this format that do not begin like a call."""
    if answer.regex:
        pattern = _ESCAPED.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0][-1], found[0]), answer.regex)
        starts = (*(mark for mark, _ in THOUGHTS), *call_starts(dialect, (), formatted=dialect.anywhere))
        begins = "|".join(map(re.escape, starts))
        return f"answer: ANSWER\nANSWER: /{pattern}/ & ~/(\\s|{begins})(.|\\n)*/"
    schema = json.loads(answer.json_schema) if answer.json_schema else {"type": "object"}
    if not dialect.anywhere:  # the condition is for the answer, not for parts of it that refer to the whole
        whole = {"$defs": {"answer": _at(schema, "#/$defs/answer")}, "allOf": _NO_CALL}
        schema = {"x-guidance": schema.get("x-guidance", {}), **whole}
    return f"answer: %json {json.dumps(guided(schema))}"


def call_schema(name: str, schema: Any, dialect: Dialect) -> dict[str, Any]:
    """Return the schema of a whole call. Its texts and answers in JSON may begin in the same way."""
    fields = {"name": {"const": name}, dialect.arguments: _at(schema, f"#/properties/{dialect.arguments}")}
    whole = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"x-guidance": guided(schema)["x-guidance"], **whole}


def guided(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the usual white space, unless it has its own."""
    own: Any = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**WHITESPACE, **own} if isinstance(own, dict) else own}


def _at(schema: Any, place: str) -> Any:
    """Return a schema for a place within another, without an id that its references do not need."""
    return bare({key: it for key, it in schema.items() if key != "$id" or _FOREIGN.search(json.dumps(schema))}, place)


def bare(schema: Any, place: str = "#", *, named: bool = False) -> Any:
    """Return a part of a schema without notes, which count for a grammar's size. References begin where its root is."""
    if isinstance(schema, dict):
        return {
            name: place + part[1:]
            if name == "$ref" and isinstance(part, str) and part[:2] in ("#", "#/")
            else part
            if name in CONSTANTS and not named
            else bare(part, place, named=name in NAMED and not named)
            for name, part in schema.items()
            if named or name not in _NOTES
        }
    return [bare(part, place) for part in schema] if isinstance(schema, list) else schema


def call_starts(dialect: Dialect, names: Collection[str], *, formatted: bool) -> tuple[str, ...]:
    """Return the texts, without blanks, with which an answer of calls begins; none where calls may follow text."""
    heads = [] if dialect.anywhere else list(map(dialect.head, names)) if formatted else ["{"]
    return tuple("".join(one.split()) for one in [dialect.opener] * (formatted or not dialect.anywhere) + heads if one)
