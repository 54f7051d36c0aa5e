"""Rules of the marks around calls: as tokens of their own, and spelled out."""

from __future__ import annotations

import json
import re

from coordinator.api.http.agents.calls.forms import Dialect, Marked
from coordinator.workers.target import Target
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import MAX_GRAMMAR_BYTES

_SHORT = 3  # characters of added tokens that are no marks, as white space


class MarkRules:
    """Rules of one grammar. Marks that are tokens of their own are allowed as such, and spelled out."""

    def __init__(self, target: Target) -> None:
        added = target.tokenizer.added_tokens_decoder.items()
        self._ids = {token.content: id_ for id_, token in added if len(token.content) > _SHORT}
        self._names: dict[str, str] = {}
        self._size = self._options = 0
        self.lines: list[str] = []

    def add(self, kind: str, rule: str, *, lazy: bool = False) -> str:
        """Add a rule, unless it is known. Return its name."""
        if rule not in self._names:
            self.count(len(rule))
            self._names[rule] = f"{kind}_{len(self.lines)}"
            self.lines.append(f"{self._names[rule]}{'[lazy]' * lazy}: {rule}")
        return self._names[rule]

    def count(self, size: int, options: int = 0) -> None:
        """Count what a grammar has, to refuse a large one before it is written: references repeat what they name."""
        self._size, self._options = self._size + size, self._options + options
        if max(self._size, self._options) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest.of("params.grammar", "larger as a grammar", f"at most {MAX_GRAMMAR_BYTES} bytes")

    def mark(self, text: str) -> str:
        """Return the rule of a text with marks."""
        parts = self._cut(text)
        rules = (f"(<[{self._ids[it]}]> | {json.dumps(it)})" if it in self._ids else json.dumps(it) for it in parts)
        rule = " ".join(rules)
        return rule if self._ids.keys().isdisjoint(parts) else self.add("mark", rule)

    def head(self, dialect: Dialect, name: str) -> tuple[str, str]:
        """Return rules of a call up to its arguments: of the mark before its name, and of the rest."""
        if not isinstance(dialect, Marked):
            return "", self.mark(dialect.head(name))
        before, after = (" /[0-9]{1,4}/ ".join(map(self.mark, it.split("0"))) for it in (dialect.begin, dialect.named))
        return self.add("mark", before) if before else "", f"{json.dumps(name)} {after}"

    def after_text(self, text: str, of: str = "TEXT", *, empty: bool = True) -> str:
        """Return a rule of any text up to a mark."""
        rules, parts = [self.add("until", f"{of} {json.dumps(text)}", lazy=True)], self._cut(text)
        if (at := next((at for at, part in enumerate(parts) if part in self._ids), None)) is not None:
            before = self.add("BEFORE", f"{of} {json.dumps(parts[0])}") if at else of + "?" * empty
            rules.append(" ".join((before, f"<[{self._ids[parts[at]]}]>", self.mark("".join(parts[at + 1 :])))))
        return rules[0] if len(rules) == 1 else self.add("text", " | ".join(rules))

    def _cut(self, text: str) -> list[str]:
        """Return the parts of a text, with those that are tokens apart."""
        tokens = sorted((token for token in self._ids if token in text), key=len, reverse=True)
        cut = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return [part for part in cut if part]
