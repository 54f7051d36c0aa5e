"""Formats of final answers where tools can be called too. An answer that follows one is never taken for a call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from coordinator.api.http.agents.dialects import THINK, Dialect
from outrider.protocol.sampling_params import Grammar

BLANK = r"/[ \n]{0,4}/"  # between thoughts and what follows
WHITESPACE = {"whitespace_pattern": r"[ ]|\n[ ]{0,32}"}
_ESCAPED = re.compile(r"\\.|/", re.DOTALL)
_VALUES = ("const", "default", "enum", "examples")  # fields of a schema that hold no schemas
# Where calls have no opener, an object with a field of arguments could be one.
_NO_CALL = {"properties": {"arguments": False, "parameters": False}}


def rule_of(answer: Grammar, dialect: Dialect) -> str:
    """Return the lines of the rule `answer`: texts of this format that do not begin like a call."""
    if answer.regex:
        pattern = _ESCAPED.sub(lambda found: r"\/" if found[0] == "/" else found[0], answer.regex)
        starts = call_starts(dialect, (), formatted=False) or (dialect.opener,)
        begins = "|".join([r"\s", *map(re.escape, (THINK, *starts))])
        return f"answer: ANSWER\nANSWER: /{pattern}/ & ~/({begins})(.|\\n)*/"
    schema = json.loads(answer.json_schema) if answer.json_schema else {"type": "object"}
    if not dialect.anywhere:
        own = [{"allOf": schema["allOf"]}] if "allOf" in schema else []
        schema = schema | {"allOf": [*own, _NO_CALL]}
    return f"answer: %json {json.dumps({'x-guidance': WHITESPACE, **schema})}"


def call_schema(name: str, schema: Any, dialect: Dialect) -> dict[str, Any]:
    """Return the schema of a whole call. Its texts and answers in JSON may begin in the same way."""
    fields = {"name": {"const": name}, dialect.arguments: _moved(schema, f"#/properties/{dialect.arguments}")}
    closed = {"required": list(fields), "additionalProperties": False}
    return {"x-guidance": schema.get("x-guidance", WHITESPACE), "type": "object", "properties": fields, **closed}


def _moved(schema: Any, place: str) -> Any:
    """Return a part of a schema whose root has moved to another place: references begin there."""
    if isinstance(schema, dict):
        return {
            name: place + part[1:]
            if name == "$ref" and isinstance(part, str) and part.startswith("#")
            else part
            if name in _VALUES
            else _moved(part, place)
            for name, part in schema.items()
        }
    return [_moved(part, place) for part in schema] if isinstance(schema, list) else schema


def call_starts(dialect: Dialect, names: Collection[str], *, formatted: bool) -> tuple[str, ...]:
    """Return the texts, without blanks, with which an answer of calls begins; none where calls may follow text."""
    if formatted:
        heads = [] if dialect.anywhere else map(dialect.head, names)
        starts = [dialect.opener, *("".join(head.split()) for head in heads)]
    else:
        starts = [] if dialect.anywhere else [dialect.opener, "{"]
    return tuple(start for start in starts if start)
