"""Formats of final answers where tools can be called too. An answer that follows one is never taken for a call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from coordinator.api.http.agents.calls.forms import HARMONY, Dialect
from coordinator.api.http.agents.calls.schemas import guided, placed
from coordinator.api.http.agents.dialects import THOUGHTS
from outrider.protocol.sampling_params import Grammar

_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)
# Where calls have no opener, an object with a field of arguments could be one.
_NO_CALL = [{"$ref": "#/$defs/answer"}, {"properties": {"arguments": False, "parameters": False}}]


def rule_of(answer: Grammar, dialect: Dialect) -> str:
    """Return the lines of the rule `answer`: texts of this format that do not begin like a call."""
    if answer.regex:
        pattern = _ESCAPED.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0][-1], found[0]), answer.regex)
        starts = (*dict(THOUGHTS), *call_starts(dialect, (), formatted=dialect.anywhere))
        unlike = "" if dialect is HARMONY else f" & ~/(\\s|{'|'.join(map(re.escape, starts))})(.|\\n)*/"
        return f"answer: ANSWER\nANSWER: /{pattern}/{unlike}"
    schema = json.loads(answer.json_schema) if answer.json_schema else {"type": "object"}
    if dialect.bare:  # the condition is for the answer, not for parts of it that refer to the whole
        whole = {"$defs": {"answer": placed(schema, "#/$defs/answer")}, "allOf": _NO_CALL}
        schema = {"x-guidance": schema.get("x-guidance", {}), **whole}
    return f"answer: %json {json.dumps(guided(schema))}"


def call_schema(name: str, schema: Any, dialect: Dialect) -> dict[str, Any]:
    """Return the schema of a whole call. Its texts and answers in JSON may begin in the same way."""
    fields = {"name": {"const": name}, dialect.arguments: placed(schema, f"#/properties/{dialect.arguments}")}
    whole = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"x-guidance": guided(schema)["x-guidance"], **whole}


def call_starts(dialect: Dialect, names: Collection[str], *, formatted: bool) -> tuple[str, ...]:
    """Return the texts, without blanks, with which an answer of calls begins; none where calls may follow text."""
    heads = [] if not dialect.bare else list(map(dialect.head, names)) if formatted else ["{"]
    return tuple("".join(one.split()) for one in [dialect.opener] * (formatted or not dialect.anywhere) + heads if one)
