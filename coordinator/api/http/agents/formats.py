"""Formats of final answers where tools can be called too. An answer that follows one is never taken for a call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from coordinator.api.http.agents.calls.forms import Dialect
from coordinator.api.http.agents.calls.schemas import guided, placed
from outrider.protocol.sampling_params import Grammar

THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # of Magistral
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # of Command A Reasoning
    ("<|channel>thought", "<channel|>"),  # of Gemma 4
)
_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)
# Where calls have no opener, an object with a field of arguments could be one.
_NO_CALL = [{"$ref": "#/$defs/answer"}, {"properties": {"arguments": False, "parameters": False}}]


def rule_of(answer: Grammar, dialect: Dialect | None = None) -> str:
    """Return the lines of the rule `answer`: texts of this format that do not begin like thoughts or a call."""
    if answer.regex:
        pattern = _ESCAPED.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0][-1], found[0]), answer.regex)
        starts = (*dict(THOUGHTS), *call_starts(dialect, (), formatted=dialect.anywhere)) if dialect else ()
        unlike = f" & ~/(\\s|{'|'.join(map(re.escape, starts))})(.|\\n)*/" if dialect else ""
        return f"answer: ANSWER\nANSWER: /{pattern}/{unlike}"
    schema = json.loads(answer.json_schema) if answer.json_schema else {"type": "object"}
    if dialect and dialect.bare:  # the condition is for the answer, not for parts of it that refer to the whole
        whole = {"$defs": {"answer": placed(schema, "#/$defs/answer")}, "allOf": _NO_CALL}
        schema = {"x-guidance": schema.get("x-guidance", {}), **whole}
    return f"answer: %json {json.dumps(guided(schema))}"


def call_starts(dialect: Dialect, names: Collection[str], *, formatted: bool) -> tuple[str, ...]:
    """Return the texts, without blanks, with which an answer of calls begins; none where calls may follow text."""
    heads = [] if not dialect.bare else list(map(dialect.head, names)) if formatted else ["{"]
    return tuple("".join(one.split()) for one in [dialect.opener] * (formatted or not dialect.anywhere) + heads if one)
