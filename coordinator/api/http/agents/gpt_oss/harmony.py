"""Harmony, the format of gpt-oss: a parser of its messages, grammars of them, and chats for its template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.calls.schemas import bare, guided
from coordinator.api.http.agents.formats import rule_of
from coordinator.api.http.agents.parser import Parser, Part, PartKind
from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import Grammar

FINAL = "<|channel|>final"  # in its template alone
# The special tokens, for the parser as characters that no text has: a text may spell `<|end|>`.
_NAMES = ("start", "end", "return", "call", "channel", "message", "constrain")
MARKS = {f"<|{name}|>": chr(0xD800 + at) for at, name in enumerate(_NAMES)}
*_ENDS, _CHANNEL, _MESSAGE, _CONSTRAIN = MARKS.values()  # after the marks that end a message
_ANY = "".join(MARKS.values())
_MARK = re.compile(f"([{_ANY}])")
_RECIPIENT = re.compile(rf"\bto=(?:functions\.)?([^\s{_ANY}]+)")
_CHANNEL_NAME = re.compile(rf"{_CHANNEL}\s*(\w+)")
# What a header begins with, and what may be the beginning of the rest: another recipient, or a type.
_NAMED = re.compile(rf"(.*?{_CHANNEL}\s*\w*|({MARKS['<|start|>']}\w*)?)(\s+to=[^\s{_ANY}]*)?", re.DOTALL)
_TEXT = re.compile(rf"(?!.*\bto=)\s*[^\s{_ANY[:5]}][^{_CHANNEL}]*\Z", re.DOTALL)  # a beginning that is of no header
_MORE = re.compile(rf"\s*(to?|{_CONSTRAIN}?(j(s(on?)?)?)?)")
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # the model knows low, medium and high


class HarmonyParser(Parser):
    """Parser of one answer. Messages to anything but the user and these functions are reasoning."""

    def __init__(self, names: Collection[str] = (), marks: Mapping[int, str] = {}, *, continued: bool = False) -> None:
        self._names, self.marks = names, marks
        self._kind = PartKind.CONTENT if continued else None  # of the message; None: its header has not ended
        self._header = ""  # after the mark that began it, or ended the message before
        self._said = set[PartKind]()
        self._between = ""  # this message and another of its kind
        self._arguments = ""  # of the last call

    def is_thinking(self) -> bool | None:
        return self._kind is PartKind.REASONING or None  # not now, but maybe later

    @property
    def cut(self) -> bool:
        with suppress(ValueError, RecursionError):
            return not isinstance(json.loads(self._arguments), dict)
        return self.calls > 0

    def feed(self, text: str) -> list[Part]:
        return [part for piece in _MARK.split(text) if piece for part in self._read(piece)]

    def end(self) -> list[Part]:
        """Return the last parts: of a header that was cut its text, if it has more than belongs to one."""
        rest = _NAMED.sub("", self._header, count=1)
        begun = rest != self._header and _MORE.fullmatch(rest)
        return [] if self._kind or begun else self._unmarked()

    def _read(self, piece: str) -> list[Part]:
        """Read a mark, or text without marks."""
        parts: list[Part] = []
        if self._kind is None and piece == _MESSAGE:
            parts = self._begin(self._header)
        elif piece in _ENDS or (piece == _CHANNEL and (self._kind or _TEXT.match(self._header))):
            parts = self._unmarked() if self._kind is None else []
            self._kind, self._header = None, piece
        elif self._kind is None:
            self._header += piece
        elif not _MARK.match(piece):
            parts = self._say(self._kind, piece)
        return parts

    def _begin(self, header: str) -> list[Part]:
        """Begin a message. Its recipient may be named before the channel or after it."""
        found, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if found and found[1] in self._names:
            self._kind, self._arguments = PartKind.ARGUMENTS, ""
            self.calls += 1
            return [Part(PartKind.CALL, found[1])]
        thinks = found or (channel and channel[1] == "analysis")
        self._kind = PartKind.REASONING if thinks else PartKind.CONTENT
        self._between = "\n\n" if self._kind in self._said else ""
        return []

    def _unmarked(self) -> list[Part]:
        """Return the parts of a message that has ended without the mark after its header."""
        rest = _NAMED.sub("", self._header, count=1)
        parts = self._begin(self._header.removesuffix(rest))
        return parts + self._say(self._kind, _MARK.sub("", rest))

    def _say(self, kind: PartKind | None, text: str) -> list[Part]:
        if not text or kind is None:
            return []
        if kind is PartKind.ARGUMENTS:
            self._arguments += text
        else:
            text, self._between = self._between + text, ""
            self._said.add(kind)
        return [Part(kind, text)]


def readable(chat: Chat) -> Chat:
    """Return a chat as gpt-oss's template reads it: one call a message, each followed by its results.

    The template takes no text beside the thoughts before a call, so a preamble becomes a part of them. Of defaults of
    some fields it takes texts alone.
    """
    for tool in chat.tools:
        fields = tool["function"].get("parameters", {}).get("properties")
        for field in fields.values() if isinstance(fields, dict) else ():
            default = field.get("default", "") if isinstance(field, dict) else ""
            if not isinstance(default, str) and field.keys() & {"enum", "oneOf"}:
                field["default"] = json.dumps(default)
    groups: list[list[dict[str, Any]]] = []
    called: dict[str, list[dict[str, Any]]] = {}  # the group of each call
    for given in chat.messages:
        message = dict(given)
        thoughts, calls = [message.pop("reasoning_content", "")], message.pop("tool_calls", ())
        if calls:
            thoughts.append(message["content"])
            message["content"] = ""
        if told := "\n\n".join(filter(None, thoughts)):
            message["thinking"] = told
        for call in calls:
            groups.append([message | {"tool_calls": [call]}])
            called[call["id"]] = groups[-1]
            message.pop("thinking", "")
        if message.get("tool_call_id") in called:
            called[message["tool_call_id"]].append(message)
        elif not calls:
            groups.append([message])
    effort = chat.variables.get("reasoning_effort", "medium")
    variables = {**chat.variables, "reasoning_effort": _EFFORTS.get(effort, effort)}
    return replace(chat, messages=[message for group in groups for message in group], variables=variables)


def grammar_of(tools: Mapping[str, Any], body: ChatBody, target: Target, answer: Grammar | None) -> Grammar | None:
    """Return the grammar of an answer that may call one of these tools, given with their parameters' schemas.

    Thoughts and preambles are free. A call is the last message of an answer, and so is a final one.
    """
    if not tools and answer is None:
        return None
    ids = {token.content: f"<[{id_}]>" for id_, token in target.tokenizer.added_tokens_decoder.items()}
    start, end, _, _, channel, message, constrain = (ids.get(mark, json.dumps(mark)) for mark in MARKS)
    again = f'{start} "assistant"'
    begin = "" if body.add_generation_prompt else again
    final = f'{begin} {"thought*" if answer else "(thought | preamble)*"} {channel} "final" form {message} answer'
    if body.continue_final_message:
        begin, final = f"TEXT? {end} {again}", "answer"
    call = f"{begin} (thought | preamble)* call"
    lines = [
        "%llguidance {}",
        f"start: {' | '.join([call] * bool(tools) + [final] * (not body.calls_required))}",
        f'thought: {channel} "analysis" {message} TEXT? {end} {again}',
        f'preamble: {channel} "commentary" {message} TEXT? {end} {again}',
        f'form: (" json" | " "? {constrain} "json")?',
        rule_of(answer) if answer else "answer: TEXT?",
        r"TEXT: /(.|\n)+/",
    ]
    calls = []
    for number, (name, schema) in enumerate(tools.items()):
        to = json.dumps(f" to=functions.{name}")
        calls.append(f"({to} {channel} CHANNEL | {channel} CHANNEL {to}) form {message} arguments_{number}")
        lines.append(f"arguments_{number}: %json {json.dumps(guided(bare(schema)))} // {name}")
    lines += [f"call: {' | '.join(calls)}", 'CHANNEL: "commentary" | "analysis"'] * bool(tools)
    return Grammar(lark="\n".join(lines))
