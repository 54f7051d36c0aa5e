"""Scanner of calls whose arguments are values between tags: they become the text of a JSON object as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from coordinator.api.http.agents.calls.forms import Marked
from coordinator.api.http.agents.calls.values import kinds, parameters, read
from coordinator.sessions.detokenizer import overlap

_TEXT = frozenset({"string"})
_PARTED = frozenset({"array", "object"})
_LONGEST = 1_024  # characters of an argument's name and the marks around it
_QUOTED = re.compile(r'\\.|"', re.DOTALL)
_BLANK, _NUMBER = r"\s*+", r"\d{1,4}+"


@cache
def head_of(form: Marked) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of a call up to its arguments, and of what may begin one."""
    begin, named = (re.escape(mark).replace("0", _NUMBER) for mark in (form.begin, form.named.strip()))
    after = rf"(?:{named})(?=[^\w.-])" if form.key else rf"(?:{named})?{_BLANK}(?=\{{)"
    begins = rf"[\w.-]{{0,130}}+{_BLANK}{_beginning(form.named.strip(), _BLANK)}"
    whole = rf"{_BLANK}{begin}([\w.-]{{1,130}}+){_BLANK}{after}"
    return re.compile(whole), re.compile(_BLANK + _beginning(form.begin, begins))


def _beginning(text: str, then: str) -> str:
    """Return the pattern of a beginning of a text, or of all of it and what comes then."""
    for char in reversed(text):
        then = f"(?:{re.escape(char).replace('0', _NUMBER)}{then})?"
    return then


@cache
def _argument_of(form: Marked) -> re.Pattern[str]:
    """Return the pattern of an argument up to its value: its name, and the mark after that."""
    key, *marks = (r"\s*".join(map(re.escape, mark.split())) for mark in (form.key, form.value, form.other) if mark)
    line = r"(?:\n|(?=[^\n]))" * form.value.endswith("\n")
    return re.compile(rf"{key}(.{{1,{_LONGEST}}}?)({'|'.join(marks)}){line}", re.DOTALL)


class TaggedScanner:
    """Scanner of one call, from its first character. Texts are passed on as they arrive, other values whole."""

    def __init__(self, form: Marked, head: re.Match[str], schema: Mapping[str, Any]) -> None:
        self._form = form
        self._schema = schema
        self._kinds: frozenset[str] | None = None  # of the value that has begun
        self._tag = form.ends.strip()
        self._ends = re.compile(rf'"|{re.escape(self._tag)}')  # of a list or an object
        self._quoted = False  # within a text of one
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
        form, key = self._form, self._form.key.strip()
        self.text = self.text.lstrip()
        if (found := _argument_of(form).match(self.text)) is not None:
            declared, _, further = parameters(self._schema)
            self._kinds = kinds(declared.get(found[1], further), self._schema)
            if form.other:  # the mark tells
                self._kinds = _TEXT if found[2] == form.value else self._kinds - _TEXT
            self.arguments += f"{self._next}{json.dumps(found[1], ensure_ascii=False)}: " + '"' * (self._kinds == _TEXT)
            self._next, self.text, self._at = ", ", self.text[found.end() :], 0
            return True
        ends = form.tail.startswith(self.text) and self.text != form.tail
        if (ends or self.text.startswith(key) or key.startswith(self.text)) and len(self.text) < _LONGEST:
            return False
        self.arguments += "}"
        self.text = self.text.removeprefix(form.tail)
        self.complete = self.done = True
        return True

    def _value(self) -> bool:
        """Read a value, or some of it. Return False if it needs more."""
        streamed, lines = self._kinds == _TEXT, "\n" * self._form.ends.startswith("\n")  # a value has lines of its own
        if self.text[:1] in ("[", "{") and not _PARTED.isdisjoint(self._kinds or ()):
            end = self._end_of_json()
        else:
            end = self.text.find(self._tag, max(0, self._at - len(self._tag)))
            self._at = len(self.text)
        if end < 0 and streamed:
            keep = max(overlap(self.text, mark, len(mark)) for mark in (self._tag, lines + self._tag))
            self.arguments += _escaped(self.text[: len(self.text) - keep])
            self.text = self.text[len(self.text) - keep :]
            self._at = 0
        if end < 0:
            return False
        value = self.text[:end].removesuffix(lines)
        self.arguments += _escaped(value) + '"' if streamed else read(value, self._kinds or ())
        self.text, self._kinds = self.text[end + len(self._tag) :], None
        return True

    def _end_of_json(self) -> int:
        """Return where a list or an object ends, whose texts may have the tag; a negative number if it does not yet."""
        while (found := (_QUOTED if self._quoted else self._ends).search(self.text, self._at)) is not None:
            if found[0] == self._tag:
                return found.start()
            self._at = found.end()
            self._quoted ^= found[0] == '"'
        left = self.text.endswith("\\") if self._quoted else len(self._tag)
        self._at = max(self._at, len(self.text) - left)
        return -1


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
