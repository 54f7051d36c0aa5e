"""Parser of answers, streamed or whole: text, reasoning and tool calls. What only looks like a call is content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from typing import NamedTuple

from coordinator.api.http.agents.calls.forms import Dialect, Marked
from coordinator.api.http.agents.calls.scanner import TaggedScanner, head_of
from coordinator.api.http.agents.formats import THOUGHTS, call_starts
from coordinator.sessions.detokenizer import overlap
from coordinator.sessions.output import Token
from coordinator.sessions.session import Session
from coordinator.workers.chat_template import Chat

_STRUCTURE = {True: re.compile(r'\\.|"', re.DOTALL), False: re.compile(r'["{}\[\]]')}  # within a string, and outside
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BLANK = " \t\r\n"
_BETWEEN = _BLANK + ",;"
_MOST = 1_024  # characters that may begin thoughts or a call: each further one has all of them read again


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

    def readable(self, chat: Chat) -> Chat:
        """Return a chat as the template reads it."""
        return chat


class PartKind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()  # its text is the function's name
    ARGUMENTS = auto()  # of the last call, to be appended


class Part(NamedTuple):
    kind: PartKind
    text: str


class Parser:
    """Parser of one answer, from its text or the tokens of its session. This one takes all of it for content."""

    marks: Mapping[int, str] = {}  # texts of special tokens around thoughts and calls, which have none in answers
    reasoned = 0  # tokens of reasoning
    calls = 0

    @property
    def cut(self) -> bool:
        """Return whether the arguments of the last call have no end."""
        return False

    def is_thinking(self) -> bool | None:
        """Return whether the answer is reasoning; None: nothing tells yet, or it may be later."""
        return False

    def feed(self, text: str) -> list[Part]:
        """Return the new parts of the answer after more of its text."""
        return [Part(PartKind.CONTENT, text)] if text else []

    def end(self) -> list[Part]:
        """Return the last parts, after all text."""
        return []

    def read(self, session: Session, tokens: Sequence[Token], *, ended: bool) -> list[Part]:
        """Return the new parts of the answer after more of its tokens."""
        parts = list[Part]()
        texts = [token.text + self.marks.get(token.token, "") for token in reversed(tokens)]
        while texts and self.is_thinking() is not False:
            parts += self.feed(texts.pop())
            self.reasoned += bool(self.is_thinking())
        session.output.thought = max(self.reasoned, session.output.thought)  # of several parsers
        parts += self.feed("".join(reversed(texts)) + session.output.rest.text * ended)
        parts += self.end() if ended else ()
        return [Part(kind, "".join(one.text for one in same)) for kind, same in groupby(parts, lambda one: one.kind)]


class AnswerParser(Parser):
    """Parser of a text. Without names there are no calls; a `formatted` answer has them instead of content."""

    def __init__(
        self, manner: Manner, names: Collection[str] = (), marks: Mapping[int, str] = {}, *, formatted: bool = False
    ) -> None:
        self.marks = marks
        self._dialect = dialect = manner.dialect
        self._think, self._thought = self._marks = manner.thoughts  # the latter without thoughts
        self._formatted = formatted
        self._starts = call_starts(dialect, names, formatted=formatted) if names else ()
        self._openers = (dialect.opener, dialect.alone) if names and dialect.anywhere and not formatted else ()
        self._names = names
        begin = AnswerParser._start if manner.thinks else AnswerParser._opening  # a step returns False if it needs more
        self._step: Callable[[AnswerParser], bool] = AnswerParser._reasoning if manner.thinking else begin
        self._text = ""  # not yet parsed
        self._blank = ""  # white space that begins the content, if any follows
        self._parts: list[Part] = []
        self._opened = ""  # text since the opener, if what follows is no call
        self._ended = False
        self.said = False  # some content
        self._call: _CallScanner | TaggedScanner = _CallScanner(names)

    def is_thinking(self) -> bool | None:
        return None if self._step is AnswerParser._start else self._step is AnswerParser._reasoning

    @property
    def cut(self) -> bool:
        return self._step is AnswerParser._in_call and bool(self._call.named) and not self._call.complete

    def feed(self, text: str) -> list[Part]:
        self._text += text
        while self._step(self):
            pass
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[Part]:
        self._ended = True
        parts = self.feed("")
        calling = self._step in (AnswerParser._between_calls, AnswerParser._in_call)
        if self.calls and calling:
            return parts  # what is left can only begin a further call
        kind = PartKind.REASONING if self._step is AnswerParser._reasoning else PartKind.CONTENT
        left = self._call.text if self._step is AnswerParser._in_call else self._text
        self._emit(kind, self._opened * calling + left)
        if self._blank and not self.calls:
            self._parts.append(Part(PartKind.CONTENT, self._blank))
        return parts + self._parts

    def _reasoning(self) -> bool:
        return self._until((self._thought,), PartKind.REASONING, AnswerParser._opening)

    def _content(self) -> bool:
        return self._until(self._openers, PartKind.CONTENT, AnswerParser._between_calls)

    def _start(self) -> bool:
        text = self._text[:_MOST].lstrip()
        mark = next((mark for mark in self._marks if text.startswith(mark)), "")
        if not (mark or self._ended) and len(self._text) < _MOST and any(it.startswith(text) for it in self._marks):
            return False
        self._text = self._text.lstrip()[len(mark) :] if mark else self._text
        self._step = AnswerParser._reasoning if mark == self._think else AnswerParser._opening
        return True

    def _opening(self) -> bool:
        """Find out whether an answer begins with calls, where only there they may be."""
        text = self._text.lstrip(" \n")  # other blanks begin free text, as for the grammar
        self._text = text if self._formatted else self._text
        begun = "".join(self._text[:_MOST].split()) if self._formatted else self._text[:_MOST].lstrip(" \n")
        may_begin = not self._ended and len(self._text) < _MOST
        if may_begin and any(start.startswith(begun) and start != begun for start in self._starts):
            return False
        self._step = AnswerParser._content
        if begun.startswith(self._starts):
            self._opened = self._dialect.opener if text.startswith(self._dialect.opener) else ""
            self._blank = self._text[: len(self._text) - len(text)]
            self._text = text[len(self._opened) :]
            self._step = AnswerParser._between_calls
        return True

    def _until(self, marks: Collection[str], kind: PartKind, then: Callable[[AnswerParser], bool]) -> bool:
        """Pass on text up to the first of these marks; an end that may begin one waits."""
        if found := [(at, mark) for mark in filter(None, marks) if (at := self._text.find(mark)) >= 0]:
            at, mark = min(found)
            self._emit(kind, self._text[:at])
            self._text, self._opened, self._step = self._text[at + len(mark) :], mark, then
            return True
        keep = max((overlap(self._text, mark, len(mark)) for mark in marks), default=0) * (not self._ended)
        self._emit(kind, self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _between_calls(self) -> bool:
        dialect = self._dialect
        text = self._text.lstrip(_BETWEEN if self.calls else _BLANK)
        if len(self._text) - len(text) >= _MOST:
            text = ""
        for mark in (dialect.closer, dialect.opener, dialect.tail.strip() * isinstance(dialect, Marked)):
            if mark and text.startswith(mark) and (self.calls or mark == dialect.opener):
                ends = mark == dialect.closer and not dialect.opens_each
                self._step = AnswerParser._content if ends else AnswerParser._between_calls
                return self._take(text, mark * (mark == dialect.opener), len(mark))
            if text and mark.startswith(text) and (self.calls or not self._ended):
                self._text = "" if self._ended else self._text
                return False
        if not text and len(self._text) < _MOST:
            return False
        if dialect.before.strip() == "[" and text.startswith("[") and self._opened.endswith(dialect.opener):
            return self._take(text, "[", 1)
        if (call := self._call_in(text)) is not None:
            self._call = call
            self._step = AnswerParser._in_call
            return self._take(text, "", 0)
        more = (self.calls or not self._ended) and 0 < len(text) < _MOST
        if more and isinstance(dialect, Marked) and self._expected and head_of(dialect)[1].fullmatch(text):
            return False
        self._emit(PartKind.CONTENT, self._opened)
        self._opened, self._step = "", AnswerParser._content
        return True

    @property
    def _expected(self) -> bool:
        """Return whether a call between marks may begin here."""
        return bool(self._opened) or not self._dialect.opens_each

    def _call_in(self, text: str) -> _CallScanner | TaggedScanner | None:
        """Return a scanner of the call that begins a text, if one does."""
        dialect, names = self._dialect, self._names
        if not isinstance(dialect, Marked):
            return _CallScanner(names) if text.startswith("{") else None
        head = head_of(dialect)[0].match(text, 0, _MOST) if self._expected else None
        if head is None or head[1] not in names:
            return None
        if not dialect.value:
            return _CallScanner(names, head.re)
        return TaggedScanner(dialect, head, names[head[1]] if isinstance(names, Mapping) else {})

    def _take(self, text: str, mark: str, length: int) -> bool:
        """Go on after white space and a mark; they are content if no call follows."""
        self._opened += self._text[: len(self._text) - len(text)] * bool(self._opened) + mark
        self._text = text[length:]
        return True

    def _in_call(self) -> bool:
        named = self._call.named
        self._text = self._call.feed(self._text)
        if self._call.named and not named:
            self.calls += 1
            self._blank, self._opened = "", ""
            self._parts.append(Part(PartKind.CALL, self._call.named))
        if self._call.arguments:
            self._parts.append(Part(PartKind.ARGUMENTS, self._call.arguments))
            self._call.arguments = ""
        if not self._call.done:
            return False
        if self._call.named:
            self._step = AnswerParser._between_calls
        else:
            self._emit(PartKind.CONTENT, self._opened + self._call.text)
            self._opened, self._step = "", AnswerParser._content
        return True

    def _emit(self, kind: PartKind, text: str) -> None:
        if kind is PartKind.CONTENT and not self.said:
            text, self._blank = (self._blank + text, "") if text.strip() else ("", self._blank + text)
        if text:
            self.said |= kind is PartKind.CONTENT
            self._parts.append(Part(kind, text))


class _CallScanner:
    """Scanner of one call, from its first character. Arguments are passed on once the function is known."""

    def __init__(self, names: Collection[str], head: re.Pattern[str] = _HEAD) -> None:
        self._bare = bare = head is not _HEAD
        self._head = head
        self._names = names
        self._depth = 0
        self._floor = 0 if bare else 1  # the depth around the arguments
        self._in_string = False
        self._at = 0  # scanned characters
        self._passed = -1  # where the arguments go on that were not passed on; negative: they have not begun
        self.complete = False  # all arguments were passed on
        self.text = self.named = self.arguments = ""
        self.done = False

    def feed(self, text: str) -> str:
        """Scan more text. Return what follows the call."""
        self.text += text
        if self._passed < 0 and (head := self._head.match(self.text, 0, _MOST)):
            self._passed = head.end()
            self._at = max(self._at, head.end()) if self._bare else self._at
            self.named = head[1] if head[1] in self._names else ""
        while not self.done and (found := _STRUCTURE[self._in_string].search(self.text, self._at)) is not None:
            self._at = found.end()
            self._scan(found[0])
        if not self.done:  # an escaped character may still be to come
            self._at = max(self._at, len(self.text) - (self._in_string and self.text.endswith("\\")))
        self._pass_on()
        rest, self.text = self.text[self._at :] if self.done else "", self.text[: self._at] if self.done else self.text
        if self.done and not self.named and not self._bare:
            self._read_whole()
        return rest

    def _scan(self, char: str) -> None:
        if char == '"':
            self._in_string = not self._in_string
        elif not self._in_string:
            self._depth += (char in "{[") - (char in "}]")
            if char in "}]" and self._depth == self._floor and 0 <= self._passed < self._at and not self.complete:
                self._pass_on()
                self.complete = True
            self.done = self._depth <= 0 and char in "}]"

    def _pass_on(self) -> None:
        if self.named and not self.complete:
            self.arguments, self._passed = self.arguments + self.text[self._passed : self._at], self._at

    def _read_whole(self) -> None:
        """Read a call whose fields are in another order, or whose arguments are a text."""
        with suppress(ValueError, RecursionError):  # it is no call then
            call = json.loads(self.text)
            given = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
            given = json.loads(given) if isinstance(given, str) else given
            if isinstance(given, dict) and call.get("name") in self._names:
                text = json.dumps(given, ensure_ascii=False, allow_nan=False).encode()  # not with half a character
                self.named, self.arguments = call["name"], text.decode()
