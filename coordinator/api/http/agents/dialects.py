"""Dialects: the forms in which families of models write tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target

THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # of Magistral
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # of Command A Reasoning
    ("<|channel|>analysis<|message|>", "assistant<|channel|>final"),  # of gpt-oss
    ("<|channel>thought", "<channel|>"),  # of Gemma 4
)
_OTHER = re.compile("<function=|<arg_key>|<tool_calls>")  # beside Hermes' marks: of Qwen3-Coder, GLM-4.5 and Apriel 1.5
_TOOLS = re.compile(r"(?<![\w.'\"])tools\b(?!['\"])")  # the variable, and no field of messages


@dataclass(frozen=True, slots=True)
class Dialect:
    """One form of tool calls. Without an opener that is required, calls must begin the answer."""

    name: str
    opener: str = ""  # marks the beginning of a call, or of a list of them
    closer: str = ""  # the end of what the opener began
    opens_each: bool = False  # each call has an opener of its own
    anywhere: bool = False  # calls may follow text: the opener is required
    before: str = ""  # between opener and call
    after: str = ""  # between call and closer
    between: str = "\n"  # calls
    arguments: str = "arguments"  # name of the field with the arguments
    bare: str = ""  # between a bare name and its arguments, where a call is no JSON object

    def head(self, name: str) -> str:
        """Return the text of a call up to its arguments."""
        if self.bare:
            return name + self.bare
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a call as a model would write it."""
        call = self.head(name) + json.dumps(arguments, ensure_ascii=False) + "}" * (not self.bare)
        return f"{self.opener}{self.before}{call}{self.after}{self.closer}" if self.anywhere else call


HERMES = Dialect("hermes", "<tool_call>", "</tool_call>", opens_each=True, anywhere=True, before="\n", after="\n")
LLAMA3 = Dialect("llama3", "<|python_tag|>", between="; ", arguments="parameters")
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", "]", anywhere=True, before="[", between=", ")
MISTRAL_ARGS = Dialect("mistral", "[TOOL_CALLS]", opens_each=True, anywhere=True, between="", bare="[ARGS]")
JSON = Dialect("json")
_BY_NAME = {dialect.name: dialect for dialect in (HERMES, LLAMA3, MISTRAL, JSON)}


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
    llama = "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template)
    marked = (dialect for dialect in (HERMES, MISTRAL) if dialect.opener in template)
    dialect = next(marked, LLAMA3 if llama else JSON) if parser == "auto" else _BY_NAME[parser]
    dialect = MISTRAL_ARGS if dialect is MISTRAL and "[ARGS]" in template else dialect
    told = parser != "auto" or (dialect is not JSON and not _OTHER.search(template))  # other calls could not be read
    knows_tools = told and _TOOLS.search(template) is not None
    several = "single tool-calls" not in template and (knows_tools or "roles must alternate" not in template)
    rules = {"several": several, "all_fields": "parameters.properties" in template}
    marks = next((marks for marks in THOUGHTS if marks[1] in template), None)
    return Manner(dialect, knows_tools, marks is not None, thoughts=marks or THOUGHTS[0], **rules)


def shows_all(target: Target, *roles: str) -> bool:
    """Return whether the template writes messages of all these roles: some drop those of the system, or refuse them."""
    chat = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    text = target.preview(Chat(chat))
    return all(message["content"] in text for message in chat)


def one_system(messages: Iterable[dict[str, Any]], target: Target) -> list[dict[str, Any]]:
    """Return messages with those of the system at the beginning as one, and with later ones if these are not shown."""
    given = [*messages]
    roles = [message["role"] for message in given]
    begun = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    if "system" in roles[begun:] and not shows_all(target, *roles[:begun][:1], "user", "assistant", "system", "user"):
        given.sort(key=lambda message: message["role"] != "system")
        begun = roles.count("system")
    joined = "\n\n".join(filter(None, (message["content"] for message in given[:begun])))
    return [{"role": "system", "content": joined}] * bool(begun) + given[begun:]
