"""Manners: how a target answers, as its chat template shows, and how it takes messages of the system."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from coordinator.api.http.agents.calls.forms import JSON, Dialect, dialect_of
from coordinator.workers.target import Target

THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # of Magistral
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # of Command A Reasoning
    ("<|channel>thought", "<channel|>"),  # of Gemma 4
)
_TOOLS = re.compile(r"(?<![\w.'\"])tools\b(?!['\"])")  # the variable, and no field of messages


@dataclass(frozen=True, slots=True)
class Manner:
    """Form of a target's answers: its dialect of tool calls, and whether it thinks first."""

    dialect: Dialect
    knows_tools: bool  # its chat template describes tools
    thinks: bool = False  # it may begin with thoughts
    thinking: bool = False  # the prompt ends in their mark
    several: bool = True  # calls in one answer: some templates raise errors for them, or for their results
    all_fields: bool = False  # of tools are needed: the template of Hermes raises an error without them
    thoughts: tuple[str, str] = THOUGHTS[0]  # the marks around them


def manner_of(target: Target, parser: str) -> Manner:
    """Return the manner that the chat template shows; `parser` may name its dialect."""
    known = target.tokenizer
    template = str(known.get_chat_template(None, tools=[{}])) if known.chat_template else ""
    dialect = dialect_of(template, parser)
    told = parser != "auto" or dialect is not JSON  # other calls could not be read
    knows_tools = told and _TOOLS.search(template) is not None
    several = "single tool-calls" not in template and (knows_tools or "roles must alternate" not in template)
    rules = {"several": several, "all_fields": "parameters.properties" in template}
    marks = next((marks for marks in THOUGHTS if marks[1] in template), None)
    return Manner(dialect, knows_tools, marks is not None, thoughts=marks or THOUGHTS[0], **rules)


def one_system(messages: Iterable[dict[str, Any]], target: Target) -> list[dict[str, Any]]:
    """Return messages with those of the system at the beginning as one, and with later ones if these are not shown."""
    given = [*messages]
    roles = [message["role"] for message in given]
    begun = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    first = ("system",) if begun else ()
    if "system" in roles[begun:] and not target.shows(*first, "user", "assistant", "system", "user"):
        given.sort(key=lambda message: message["role"] != "system")
        begun = roles.count("system")
    joined = "\n\n".join(filter(None, (message["content"] for message in given[:begun])))
    return [{"role": "system", "content": joined}] * bool(begun) + given[begun:]
