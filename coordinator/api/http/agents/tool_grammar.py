"""Grammars of answers with tools: each call follows the schema of its tool.

With `required`, or a named tool, calls begin at the first token. With `auto` text is free until the dialect's opener,
unless a final answer has a format: then the first token begins either calls or an answer in that format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from coordinator.api.http.agents.bodies import ChatBody, ToolChoice
from coordinator.api.http.agents.calls.arguments import arguments_rule
from coordinator.api.http.agents.calls.forms import Dialect, Marked
from coordinator.api.http.agents.calls.marks import MarkRules
from coordinator.api.http.agents.calls.schemas import bare, guided, placed
from coordinator.api.http.agents.formats import rule_of
from coordinator.api.http.agents.parser import Manner
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import Grammar

MAX_CALLS = 16  # in one answer
BLANKS = r"/[ \n]{0,8}/"  # within a list of calls
BLANK = r"/[ \n]{0,4}/"  # between thoughts and what follows


def grammar_of(
    manner: Manner, tools: Mapping[str, Any], body: ChatBody, target: Target, answer: Grammar | None
) -> Grammar | None:
    """Return the grammar of an answer that may, or must, call these tools, given with their parameters' schemas.

    `answer` is the format of one without calls; None: any text.
    """
    if (required := body.calls_required) is None:
        return answer
    one = not manner.several or body.parallel_tool_calls is False or isinstance(body.tool_choice, ToolChoice)
    rules = _Rules(manner.dialect, target, None if required else answer)
    calls = rules.calls(tools, 1 if one else MAX_CALLS, required=required)
    start = ""
    if manner.thinking or (manner.thinks and not required):
        opened = "" if manner.thinking else rules.mark(manner.thoughts[0])
        start = f"({opened} {rules.after_text(manner.thoughts[1])} {rules.blank})" + ("" if manner.thinking else "?")
    free = "" if required else f" | {rules.answer(manner)}"
    lines = ["%llguidance {}", f"start: {start} ({calls}{free})", *rules.lines, r"TEXT: /(.|\n)*/"]
    return Grammar(lark="\n".join(lines))


class _Rules(MarkRules):
    """Rules of one grammar."""

    def __init__(self, dialect: Dialect, target: Target, format_: Grammar | None) -> None:
        super().__init__(target)
        self._dialect = dialect
        self._format = format_
        self.blank = "" if format_ is None else BLANK

    def calls(self, tools: Mapping[str, Mapping[str, Any]], most: int, *, required: bool) -> str:
        dialect = self._dialect
        each, first, tail = [], [], self.mark(dialect.tail)
        for number, (name, schema) in enumerate(tools.items()):
            (begin, head), whole = self.head(dialect, name), guided(bare(schema))
            if self._format and dialect.bare:  # its texts and answers in JSON may begin in the same way
                given = placed(schema, f"#/properties/{dialect.arguments}")
                fields = {"name": {"const": name}, dialect.arguments: given}
                call = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
                whole, head, tail = {"x-guidance": whole["x-guidance"], **call}, "", ""
            rule = f"%json {json.dumps(whole)} // {name}"
            if isinstance(dialect, Marked) and dialect.value:
                rule = arguments_rule(dialect, name, schema, self)
            self.lines.append(f"arguments_{number}: {rule}")
            each.append(f"{head} arguments_{number}")
            first.append(f"/[ \\n]{{0,4}}{re.escape(dialect.opener + dialect.head(name))}/ arguments_{number}")
        self.lines.append(f"begun: ({' | '.join(each)}) {tail}\ncall: {begin} begun")
        before, after, closer = map(self.mark, (dialect.before, dialect.after, dialect.closer))
        blank = BLANKS * dialect.spaced
        one = f"{before} call {after} {closer}" if dialect.opens_each else "call"
        again = f"{self.mark(dialect.between + dialect.opener * dialect.opens_each)} {blank}"
        more = f"({again} {one}){{0,{most - 1}}}" if most > 1 else ""
        calls = f"{one} {more}" if dialect.opens_each else f"{before} {blank} call {more} {blank} {after} {closer}"
        if dialect.bare:
            opener = f"{self.mark(dialect.opener)}?" if dialect.opener else ""
            return f"{'' if self._format else BLANK} {opener} {calls}"
        if not dialect.anywhere:  # texts may begin like calls up to the last character of this
            return f"({' | '.join(first)}) {tail} {more} {blank} {after} {closer}"
        free = not (required or self._format)
        alone = f" | {self.after_text(dialect.alone)} begun {after} {closer} {more}" if free and dialect.alone else ""
        return f"({self.after_text(dialect.opener) if free else self.mark(dialect.opener)} {calls}{alone})"

    def answer(self, manner: Manner) -> str:
        """Return the rule of an answer without calls."""
        if self._format is not None:
            self.lines.append(rule_of(self._format, self._dialect))
            return "answer"
        if self._dialect.anywhere:
            return "TEXT"
        begins = rf"({re.escape(self._dialect.opener)}[ \t\r\n]*)" if self._dialect.opener else "()"
        begins += r"*\{" if self._dialect.bare else r"+[\w.-]+\s*\("
        begins += rf"|\s*{re.escape(manner.thoughts[0])}" * (manner.thinks and not manner.thinking)  # in letters, too
        self.lines.append(rf"ANSWER: /(.|\n)*/ & ~/[ \n]*({begins})(.|\n)*/")
        return "ANSWER"
