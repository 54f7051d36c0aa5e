"""Grammars of answers with tools: each call follows the schema of its tool.

With `required`, or a named tool, calls begin at the first token. With `auto` text is free until the dialect's opener,
unless a final answer has a format: then the first token begins either calls or an answer in that format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from coordinator.api.http.agents.dialects import Dialect, Manner
from coordinator.api.http.agents.formats import bare, call_schema, guided, rule_of
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import Grammar

MAX_CALLS = 16  # in one answer
BLANK = r"/[ \n]{0,4}/"  # between thoughts and what follows


def grammar_of(
    tools: Mapping[str, Mapping[str, Any]],
    manner: Manner,
    target: Target,
    *,
    required: bool,
    parallel: bool,
    answer: Grammar | None = None,  # the format of one without calls; None: any text
) -> Grammar:
    """Return the grammar of an answer that may, or must, call these tools, given with their parameters' schemas."""
    rules = _Rules(manner.dialect, target, None if required else answer)
    calls = rules.calls(tools, MAX_CALLS if parallel else 1, required=required)
    start = ""
    if manner.thinking or (manner.thinks and not required):
        opened = "" if manner.thinking else rules.mark(manner.thoughts[0])
        start = f"({opened} {rules.after_text(manner.thoughts[1])} {rules.blank})" + ("" if manner.thinking else "?")
    free = "" if required else f" | {rules.answer(manner)}"
    lines = ["%llguidance {}", f"start: {start} ({calls}{free})", *rules.lines, r"TEXT: /(.|\n)*/"]
    return Grammar(lark="\n".join(lines))


class _Rules:
    """Rules of one grammar. Markers that are tokens of their own are allowed as such, and spelled out."""

    def __init__(self, dialect: Dialect, target: Target, format_: Grammar | None) -> None:
        self._dialect = dialect
        self._format = format_
        self.blank = "" if format_ is None else BLANK
        self._ids = {token.content: id_ for id_, token in target.tokenizer.added_tokens_decoder.items()}
        self.lines: list[str] = []

    def mark(self, text: str) -> str:
        quoted = json.dumps(text)
        return f"(<[{self._ids[text]}]> | {quoted})" if text in self._ids else quoted

    def after_text(self, text: str) -> str:
        """Return a rule of any text up to a mark."""
        name = f"until_{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: TEXT {json.dumps(text)}")
        return f"({name} | TEXT? <[{self._ids[text]}]>)" if text in self._ids else name

    def calls(self, tools: Mapping[str, Mapping[str, Any]], most: int, *, required: bool) -> str:
        dialect = self._dialect
        each = []
        for number, (name, schema) in enumerate(tools.items()):
            head = f"{json.dumps(name)} {self.mark(dialect.bare)}" if dialect.bare else json.dumps(dialect.head(name))
            whole, tail = guided(bare(schema)), "" if dialect.bare else '"}"'
            if self._format and not dialect.anywhere:
                whole, head, tail = call_schema(name, schema, dialect), "", ""
            self.lines.append(f"arguments_{number}: %json {json.dumps(whole)} // {name}")
            each.append(f"{head} arguments_{number} {tail}")
        self.lines.append(f"call: {' | '.join(each)}")
        before, after = (json.dumps(text) if text else "" for text in (dialect.before, dialect.after))
        closer = self.mark(dialect.closer) if dialect.closer else ""
        one = f"{before} call {after} {closer}" if dialect.opens_each else "call"
        again = json.dumps(dialect.between) if dialect.between else ""
        again += f" {self.mark(dialect.opener)}" if dialect.opens_each else ""
        more = f"({again} {one}){{0,{most - 1}}}" if most > 1 else ""
        self.lines.append(f"calls: {one} {more}" if dialect.opens_each else f"calls: {before} call {more} {closer}")
        if dialect.anywhere:
            opening = self.mark(dialect.opener) if required or self._format else self.after_text(dialect.opener)
        else:
            opening = ("" if self._format else BLANK) + (f" {self.mark(dialect.opener)}?" if dialect.opener else "")
        return f"{opening} calls"

    def answer(self, manner: Manner) -> str:
        """Return the rule of an answer without calls."""
        if self._format is not None:
            self.lines.append(rule_of(self._format, self._dialect))
            return "answer"
        if self._dialect.anywhere:
            return "TEXT"
        begins = rf"({re.escape(self._dialect.opener)}[ \t\r\n]*)*\{{" if self._dialect.opener else r"\{"
        mark = rf"|\s*{re.escape(manner.thoughts[0])}"  # in letters, here and above
        begins += mark if manner.thinks and not manner.thinking else ""
        self.lines.append(rf"ANSWER: /(.|\n)*/ & ~/[ \n]*({begins})(.|\n)*/")
        return "ANSWER"
