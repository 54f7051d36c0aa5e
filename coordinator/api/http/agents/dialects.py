"""Manners: how a target takes chats and answers, as its chat template shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coordinator.api.http.agents.bodies import ChatBody, ToolChoice
from coordinator.api.http.agents.calls.forms import JSON, Dialect, dialect_of
from coordinator.api.http.agents.formats import THOUGHTS
from coordinator.api.http.agents.gpt_oss import harmony
from coordinator.api.http.agents.parser import AnswerParser, Manner, Parser
from coordinator.api.http.agents.tool_grammar import grammar_of
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import Grammar

HARMONY = Dialect("harmony")
_VARIABLE = re.compile(r"(?<![\w.'\"])tools\b(?!['\"])")  # and no field of messages
_Tools = Mapping[str, dict[str, Any]]  # schemas of their parameters


class TextManner(Manner):
    """Manner of answers that are one text, with marks around thoughts and calls."""

    def grammar(self, tools: _Tools, body: ChatBody, target: Target, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of an answer that may call these tools; `answer` is the format of one without calls."""
        if (required := body.calls_required) is None:
            return answer
        several = self.several and body.parallel_tool_calls is not False
        parallel = several and not isinstance(body.tool_choice, ToolChoice)
        return grammar_of(tools, self, target, required=required, parallel=parallel, answer=answer)

    def parsers(self, tools: _Tools, body: ChatBody, target: Target) -> list[Parser]:
        """Return a parser of each answer."""
        if not tools and not self.thinks:
            return [Parser() for _ in range(body.choices)]
        names = tools if self.dialect.value else frozenset(tools)  # schemas tell what values between tags are
        texts = "\n".join([self.dialect.marks] * bool(tools) + [*self.thoughts] * self.thinks)
        added = target.tokenizer.added_tokens_decoder.items()
        marks = {id_: token.content for id_, token in added if token.special and token.content in texts}
        return [AnswerParser(self, names, marks, formatted=body.formatted) for _ in range(body.choices)]


class HarmonyManner(Manner):
    """Manner of gpt-oss, whose answers are messages."""

    readable = staticmethod(harmony.readable)
    grammar = staticmethod(harmony.grammar_of)

    def parsers(self, tools: _Tools, body: ChatBody, target: Target) -> list[Parser]:
        added = target.tokenizer.added_tokens_decoder.items()
        marks = {id_: harmony.MARKS[token.content] for id_, token in added if token.content in harmony.MARKS}
        names, continued = frozenset(tools), body.continue_final_message
        return [harmony.HarmonyParser(names, marks, continued=continued) for _ in range(body.choices)]


def manner_of(target: Target, parser: str) -> TextManner | HarmonyManner:
    """Return the manner that the chat template shows; `parser` may name the dialect of a text."""
    known = target.tokenizer
    template = str(known.get_chat_template(None, tools=[{}])) if known.chat_template else ""
    kind, dialect = (
        (HarmonyManner, HARMONY) if harmony.FINAL in template else (TextManner, dialect_of(template, parser))
    )
    told = parser != "auto" or dialect is not JSON  # other calls could not be read
    knows_tools = told and _VARIABLE.search(template) is not None
    several = "single tool-calls" not in template and (knows_tools or "roles must alternate" not in template)
    marks = next((marks for marks in THOUGHTS if marks[1] in template), None)
    rules = {"several": several, "all_fields": "parameters.properties" in template}
    return kind(dialect, knows_tools, marks is not None, thoughts=marks or THOUGHTS[0], **rules)
