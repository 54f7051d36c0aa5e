"""Manners: how a target takes chats and answers, as its chat template shows."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from coordinator.api.http.agents.bodies import ChatBody, ChatFields, Tool
from coordinator.api.http.agents.calls.forms import JSON, Dialect, dialect_of, give_ids
from coordinator.api.http.agents.formats import THOUGHTS
from coordinator.api.http.agents.gpt_oss import harmony
from coordinator.api.http.agents.parser import AnswerParser, Manner, Parser
from coordinator.api.http.agents.tool_grammar import grammar_of
from coordinator.api.preprocess import one_system
from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target

HARMONY = Dialect("harmony")
_VARIABLE = re.compile(r"(?<![\w.'\"])tools\b(?!['\"])")  # and no field of messages
_Tools = Mapping[str, dict[str, Any]]  # schemas of their parameters
_INSTRUCTIONS = """You can call these functions. Each line is one of them, with the JSON schema of its parameters:
{tools}
To call a function, answer with nothing but its name and its arguments, in this form:
{form}"""
_ALL_FIELDS = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}


class TextManner(Manner):
    """Manner of answers that are one text, with marks around thoughts and calls."""

    grammar = grammar_of

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
    kind = HarmonyManner if harmony.FINAL in template else TextManner
    dialect = HARMONY if kind is HarmonyManner else dialect_of(template, parser)
    told = parser != "auto" or dialect is not JSON  # other calls could not be read
    knows_tools = told and _VARIABLE.search(template) is not None
    several = "single tool-calls" not in template and (knows_tools or "roles must alternate" not in template)
    marks = next((marks for marks in THOUGHTS if marks[1] in template), None)
    rules = {"several": several, "all_fields": "parameters.properties" in template}
    return kind(dialect, knows_tools, marks is not None, thoughts=marks or THOUGHTS[0], **rules)


def chat_of(body: ChatFields, tools: Sequence[Tool], manner: Manner, target: Target) -> Chat:
    """Return the chat of a body as the target's template reads it."""
    messages = one_system((message.plain for message in body.messages), target)
    for named in (it for message in messages for it in (message, *message.get("tool_calls", ()))):
        if manner.dialect.name == "mistral":  # its templates raise errors for other ids
            named.update({key: named[key].rjust(9, "0")[-9:] for key in ("id", "tool_call_id") if key in named})
    give_ids(messages, manner.dialect)
    absent: dict[str, Any] = _ALL_FIELDS if manner.all_fields else {}
    functions = (absent | tool.function.model_dump(exclude_none=True, exclude={"strict", "type"}) for tool in tools)
    described = [{"type": "function", "function": function} for function in functions]
    if not manner.knows_tools:
        _put_in_words(messages, manner.dialect, ("calls", "results"))
        if described:
            _instruct(messages, described, manner.dialect, target)
        described = []
    elif any("tool_calls" in message for message in messages):
        _put_in_words(messages, manner.dialect, target.dropped[bool(described)])
    chat = Chat(messages, described, body.add_generation_prompt, body.continue_final_message, body.variables)
    return manner.readable(chat)


def _instruct(messages: list[dict[str, Any]], tools: Sequence[Any], dialect: Dialect, target: Target) -> None:
    """Add instructions to the system message, new or given; to the first other one where the template shows none."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines, form=dialect.write("NAME", {"PARAMETER": "VALUE"}))
    shown, given = target.shows("system", "user"), messages[0]["role"] == "system"
    if shown and not given:
        messages.insert(0, {"role": "system", "content": ""})
    told = messages[1] if given and not shown and len(messages) > 1 else messages[0]
    told["content"] = f"{told['content']}\n\n{text}".lstrip()


def _put_in_words(messages: Sequence[dict[str, Any]], dialect: Dialect, parts: Collection[str]) -> None:
    """Write calls into the texts of assistants, and their results into messages of the user, as `parts` has them."""
    names: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if "results" in parts and (id_ := message.pop("tool_call_id", None)) is not None:
            message.update(role="user", content=f"Result of {names.get(id_, 'a function')}:\n{message['content']}")
        if "calls" in parts and calls:
            written = dialect.write_all(call["function"] for call in message.pop("tool_calls"))
            message["content"] = "\n".join(filter(None, [message["content"], written]))
