"""Scanner of calls whose arguments have marks of their own: they become the text of a JSON object as they arrive."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from coordinator.api.http.agents.calls.forms import Marked
from coordinator.api.http.agents.calls.values import KINDS, as_json, from_python, parameters, read, wanted
from coordinator.sessions.detokenizer import overlap

_TEXT = frozenset({"string"})
_PARTED = frozenset({"array", "object"})
_LONGEST = 1_024  # characters of an argument's name and the marks around it
_BLANK, _NUMBER = r"\s*+", r"\d{1,4}+"
_NAME = r"""[^\s=,()\[\]{}'"]"""  # characters of an argument's name in Python
_ESCAPE = r"\\(?>[0-7]{1,3}+|x[0-9a-fA-F]{0,2}+|u[0-9a-fA-F]{0,4}+|U[0-9a-fA-F]{0,8}+|.)(?=.)"  # in a text there
_INSIDE = {quote: re.compile(rf"(?>(?:[^\\{quote}]++|{_ESCAPE})*)", re.DOTALL) for quote in "'\""}  # *+ errs in 3.11.4
_QUOTED = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in _INSIDE}


@cache
def head_of(form: Marked) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of a call up to its arguments, and of what may begin one."""
    begin, named = (re.escape(mark).replace("0", _NUMBER) for mark in (form.begin, form.named.strip()))
    follows = r"[^\w.-]" if form.key else rf"{_BLANK}(?:[)]|{_NAME}++{_BLANK}=)"
    after = rf"(?:{named})(?={follows})" if form.value else rf"(?:{named})?{_BLANK}(?=\{{)"
    begins = rf"[\w.-]{{0,130}}+{_BLANK}{_beginning(form.named.strip(), rf'{_BLANK}(?>(?:{_NAME}++{_BLANK})?)')}"
    whole = rf"{_BLANK}(?:{begin}){'?' * bool(form.alone)}([\w.-]{{1,130}}+){_BLANK}{after}"
    return re.compile(whole), re.compile(f"{_BLANK}(?:{_beginning(form.begin, begins)}|{begins * bool(form.alone)})")


def _beginning(text: str, then: str) -> str:
    """Return the pattern of a beginning of a text, or of all of it and what comes then."""
    for char in reversed(text):
        then = f"(?:{re.escape(char).replace('0', _NUMBER)}{then})?"
    return then


@cache
def _argument_of(form: Marked) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of an argument up to its value (name, mark, quote of a text), and of what may begin one."""
    if not form.key:
        whole = rf",?{_BLANK}({_NAME}{{1,{_LONGEST}}}+){_BLANK}(=){_BLANK}(['\"]|(?=\S))"
        return re.compile(whole), re.compile(f",?{_BLANK}{_NAME}*+{_BLANK}=?{_BLANK}")
    key, *marks = (r"\s*".join(map(re.escape, mark.split())) for mark in (form.key, form.value, form.other) if mark)
    line = r"(?:\n|(?=[^\n]))" * form.value.endswith("\n")
    whole, begins = rf"{key}(.{{1,{_LONGEST}}}?)({'|'.join(marks)}){line}", _beginning(form.key.strip(), ".*+")
    return re.compile(whole, re.DOTALL), re.compile(begins, re.DOTALL)


class TaggedScanner:
    """Scanner of one call, from its first character. Texts are passed on as they arrive, other values whole."""

    def __init__(self, form: Marked, head: re.Match[str], schema: Mapping[str, Any]) -> None:
        self._form = form
        self._argument, self._begins = _argument_of(form)
        self._schema = schema
        self._kinds: frozenset[str] | None = None  # of the value that has begun
        self._tag = form.ends.strip()
        self._ends = re.compile(rf'"|{re.escape(self._tag)}' if form.key else r"""['",()\[\]{}]""")  # of other values
        self._quote, self._depth = "", 0  # around what is scanned there
        self._fixed: dict[str, str] = {}  # constants that the value may be
        self._at = 0  # scanned characters of a value
        self._next = ""  # before a further argument
        self._head: re.Match[str] | None = head
        self.named = self.arguments = self.text = ""
        self.complete = self.done = False

    def feed(self, text: str) -> str:
        """Scan more text. Return what follows the call."""
        self.text += text
        if self._head is not None:
            self.named, self.arguments, self.text = self._head[1], "{", self.text[self._head.end() :]
            self._head = None
        while not self.done and (self._between() if self._kinds is None else self._value()):
            pass
        return self.text * self.done

    def _between(self) -> bool:
        """Read the beginning of an argument, or the end of all. Return False if it needs more."""
        form = self._form
        self.text = self.text.lstrip()
        if (found := self._argument.match(self.text)) is not None:
            named, _, further = parameters(self._schema)
            self._kinds, self._fixed = wanted(named.get(found[1], further), self._schema)
            if form.other:  # the mark tells
                self._kinds, self._fixed = _TEXT if found[2] == form.value else self._kinds - _TEXT, {}
            if not form.key:
                self._kinds, self._fixed, self._quote = _TEXT if found[3] else KINDS, {}, found[3]
            self.arguments += f"{self._next}{as_json(found[1])}: " + '"' * (self._kinds == _TEXT)
            self._next, self.text, self._at = ", ", self.text[found.end() :], 0
            return True
        ends = form.tail.startswith(self.text) and self.text != form.tail
        if (ends or self._begins.fullmatch(self.text)) and len(self.text) < _LONGEST:
            return False
        self.arguments += "}"
        self.text = self.text.removeprefix("" if form.key else ",").lstrip().removeprefix(form.tail)
        self.complete = self.done = True
        return True

    def _value(self) -> bool:
        """Read a value, or some of it. Return False if it needs more."""
        tags, streamed = bool(self._form.key), self._kinds == _TEXT
        lines = "\n" * self._form.ends.startswith("\n")  # a value has lines of its own
        if streamed and not tags:
            return self._text()
        if not tags or (self.text[:1] in ("[", "{") and not _PARTED.isdisjoint(self._kinds or ())):
            end = self._end_of_json()
        else:
            end = self.text.find(self._tag, max(0, self._at - len(self._tag)))
            self._at = len(self.text)
        if end < 0 and streamed:
            keep = max(overlap(self.text, mark, len(mark)) for mark in (self._tag, lines + self._tag))
            self.arguments += as_json(self.text[: len(self.text) - keep])[1:-1]
            self.text = self.text[len(self.text) - keep :]
            self._at = 0
        if end < 0:
            return False
        value = self.text[:end].removesuffix(lines)
        fixed = self._fixed.get(value.strip()) or read(value if tags else from_python(value), self._kinds or ())
        self.arguments += as_json(value)[1:] if streamed else fixed
        self.text, self._kinds = self.text[end + len(self._tag) * tags :], None
        return True

    def _text(self) -> bool:
        """Read a text in Python, or some of it. Return False if it needs more."""
        end = next(_INSIDE[self._quote].finditer(self.text)).end()
        ended = self.text.startswith(self._quote, end)
        self.arguments += from_python(f"{self._quote}{self.text[:end]}{self._quote}")[1:-1] + '"' * ended
        self.text = self.text[end + ended :]
        self._kinds, self._quote = (None, "") if ended else (self._kinds, self._quote)
        return ended

    def _end_of_json(self) -> int:
        """Return where a list or an object ends, whose texts may have the tag; a negative number if it does not yet."""
        while (found := _QUOTED.get(self._quote, self._ends).search(self.text, self._at)) is not None:
            if not self._quote and not self._depth and found[0] in (self._tag, ")", "]", "}"):
                return found.start()
            self._at = found.end()
            if found[0] in _INSIDE:
                self._quote = "" if self._quote else found[0]
            self._depth += (found[0] in "([{") - (found[0] in ")]}")
        left = self.text.endswith("\\") if self._quote else len(self._tag)
        self._at = max(self._at, len(self.text) - left)
        return -1
