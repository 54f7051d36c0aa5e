"""Rules of arguments between tags: each follows the schema of its parameter.

Texts are free up to the tag that ends them, but for their length; other values are JSON. A text that may be an object
or a list as well does not begin like one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from coordinator.api.http.agents.calls.forms import Marked
from coordinator.api.http.agents.calls.marks import MarkRules
from coordinator.api.http.agents.calls.schemas import bare, guided, placed
from coordinator.api.http.agents.calls.values import choices, kind_of, parameters
from outrider.protocol.errors import InvalidRequest

_ANY = r"(.|\n)"
_OF_TEXTS = {"type", "minLength", "maxLength"}
_OF_TOOLS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$ref"}
_OF_TOOLS |= {"$schema", "$id", "x-guidance"}


def arguments_rule(form: Marked, name: str, schema: Mapping[str, Any], rules: MarkRules) -> str:
    """Return the rule of a call's arguments: in the order of their schema, then those that it does not name."""
    try:
        return _ArgumentRules(form, name, schema, rules).pairs()
    except RecursionError as error:
        raise InvalidRequest.of("params.grammar", f"{name}: a chain of references", "a shorter one") from error


class _ArgumentRules:
    """Rules of the arguments of one tool."""

    def __init__(self, form: Marked, name: str, schema: Mapping[str, Any], rules: MarkRules) -> None:
        self._form, self._name, self._rules = form, name, rules
        self._root: dict[str, Any] = bare(schema)
        options = schema.get("x-guidance")
        self._strict = not (isinstance(options, dict) and options.get("lenient"))
        self._tag = form.ends.strip()
        self._ends = self._mark(form.ends)
        self._values: dict[str, str] = {}  # rules of values, by their schemas

    def pairs(self) -> str:
        self._refuse_unknown(self._root, _OF_TOOLS)
        declared, required, further = parameters(self._root)
        named = declared | {key: further for key in required if key not in declared}
        if "" in named:
            self._refuse("a parameter without a name", "")
        parts = [self._pair(json.dumps(key), part) + "?" * (key not in required) for key, part in named.items()]
        if further is not False:
            others = f" & ~/{'|'.join(map(_escaped, named))}/" * bool(named)
            key = self._rules.add("KEY", rf"/[^<>\"\s]{{1,64}}/{others}")
            parts.append(self._pair(key, further) + "*")
        return " ".join(parts)

    def _pair(self, key: str, schema: Any) -> str:
        mark, form = self._mark, self._form
        options = [*choices(schema, self._root)]
        self._rules.count(0, len(options))
        free = [it for it in options if kind_of(it) == "string" and "const" not in it]
        fixed = [it["const"] for it in options if kind_of(it) == "string" and "const" in it]
        values = [it for it in options if kind_of(it) != "string"]
        if values == options:
            values = [schema]  # as it is, for what its alternatives have in common
        elif free and not form.other:  # a number and others are texts too, and are read as what they are
            values = [it for it in values if kind_of(it) in ("array", "object")]
        texts = [self._text(it, bool(values) and not form.other) for it in free]
        texts += [f"{json.dumps(it)} {self._ends}" for it in fixed]
        written = [f"{self._json(values)} {self._ends}"] if values else []
        told = [(form.value, texts), (form.other or form.value, written)]
        marks = dict.fromkeys(at for at, some in told if some)
        rules = (f"{mark(at)} ({' | '.join(one for at_, some in told if at_ == at for one in some)})" for at in marks)
        pair = f"({mark(form.key)} {key} ({' | '.join(rules)}))"
        self._rules.count(len(pair))
        return pair

    def _mark(self, text: str) -> str:
        return self._rules.add("mark", self._rules.mark(text))  # by name: each parameter has them

    def _text(self, schema: Mapping[str, Any], values: bool) -> str:
        self._refuse_unknown(schema, _OF_TEXTS)
        least, most = (it if type(it := schema.get(f"{end}Length")) is int else None for end in ("min", "max"))
        if not 0 <= (least or 0) <= (most if most is not None else sys.maxsize):
            self._refuse(f"minLength {least} with maxLength {most}", least)
        text = "TEXT"
        if held := values or least or most is not None:
            rules = [
                rf"/{_ANY}{{{least or 0},{'' if most is None else most}}}/",
                rf"~/{_ANY}*{_escaped(self._tag)}{_ANY}*/",
            ]
            rules += [rf"~/\s*[\[{{]{_ANY}*/"] * values
            text = self._rules.add("TEXT", " & ".join(rules))
        ends = self._form.ends if held else self._tag
        after = self._form.ends.partition(self._tag)[2]
        whole = self._rules.after_text(ends.rstrip(), text, empty=not least)
        return self._rules.add("text", f"{whole} {json.dumps(after)}") if after else whole

    def _json(self, options: Sequence[dict[str, Any]]) -> str:
        """Return the rule of a value that follows one of these schemas, with what they refer to."""
        text = json.dumps(options)
        if text not in self._values:
            schema: dict[str, Any] = options[0] if len(options) == 1 else {"anyOf": [*options]}
            if '"$ref"' in text:
                place = "#/$defs/arguments"
                schema = {**placed(schema, place), "$defs": {"arguments": placed(self._reached(options), place)}}
            schema = guided({**schema, "x-guidance": self._root.get("x-guidance", {})})
            self._values[text] = self._rules.add("value", f"%json {json.dumps(schema)} // {self._name}")
        return self._values[text]

    def _reached(self, options: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the definitions that these schemas need, or the whole schema if one of them refers elsewhere."""
        reached: dict[str, dict[str, Any]] = {}
        left: list[Any] = [*options]
        while left:
            part = left.pop()
            if isinstance(part, dict) and isinstance(place := part.get("$ref"), str):
                whole, kind, name, *_ = (*place.split("/", 3), "", "")
                name = name.replace("~1", "/").replace("~0", "~")
                known = self._root.get(kind) if whole == "#" and kind in ("$defs", "definitions") else None
                if not isinstance(known, dict) or name not in known:
                    return self._root
                if name not in reached.setdefault(kind, {}):
                    reached[kind][name] = known[name]
                    left.append(known[name])
            left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return reached

    def _refuse_unknown(self, schema: Mapping[str, Any], known: set[str]) -> None:
        """Refuse keywords of a strict tool that hold nothing in this form."""
        if self._strict and (lacked := next((key for key in schema if key not in known), None)) is not None:
            self._refuse(lacked, lacked)

    def _refuse(self, what: str, value: object) -> NoReturn:
        reason, field = (
            f"{self._name}: {what} cannot be held in calls of the form {self._form.name}",
            "params.grammar.lark",
        )
        raise InvalidRequest(f"{field} does not compile: {reason}", field=field, value=value, limit=reason)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
