"""Rules of arguments with marks of their own: each follows the schema of its parameter.

Between tags, texts are free up to the tag that ends them, but for their length; other values are JSON. A text that may
be an object or a list as well does not begin like one. In Python, texts have either quote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from coordinator.api.http.agents.calls.forms import Marked
from coordinator.api.http.agents.calls.marks import MarkRules
from coordinator.api.http.agents.calls.schemas import bare, guided, placed
from coordinator.api.http.agents.calls.values import as_json, choices, found, kind_of, parameters
from outrider.protocol.errors import InvalidRequest

_ANY = r"(.|\n)"
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_OF_TEXTS, _OF_TOOLS = {"type", "minLength", "maxLength"}, _OF_OBJECTS | {"$ref", "x-guidance"}
_LONGEST, _MOST = 1_000, 2**31  # of texts between tags, and of what can be counted
_COMMA, _COLON, _KEY = "/, ?/", "/: ?/", r"[^\s=,()\[\]{}'\"]{1,64}"
_ESCAPE = r"""\\(['"\\abfnrtv]|x[0-9a-fA-F]{2}|u([0-9a-ce-fA-CE-F][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2})"""
_WORDS = {"boolean": '("true" | "false" | "True" | "False")', "null": '("null" | "None")'}


def arguments_rule(form: Marked, name: str, schema: Mapping[str, Any], rules: MarkRules) -> str:
    """Return the rule of a call's arguments: in the order of their schema, then those that it does not name."""
    try:
        return (_ArgumentRules if form.key else _PythonRules)(form, name, schema, rules).pairs()
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
        self._refuse_unknown(self._root, _OF_TOOLS)

    def pairs(self) -> str:
        named, required, further = parameters(self._root)
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
        if cut := [it for it in fixed if self._tag in it]:
            self._refuse(f"a text with {self._tag}", cut[0])
        told = {form.value: texts}
        if values:
            told.setdefault(form.other or form.value, []).append(f"{self._json(values)} {self._ends}")
        rules = (f"{mark(at)} ({' | '.join(some)})" for at, some in told.items() if some)
        pair = f"({mark(form.key)} {key} ({' | '.join(rules)}))"
        self._rules.count(len(pair))
        return pair

    def _mark(self, text: str) -> str:
        return self._rules.add("mark", self._rules.mark(text))  # by name: each parameter has them

    def _text(self, schema: Mapping[str, Any], values: bool) -> str:
        self._refuse_unknown(schema, _OF_TEXTS)
        text, often = "TEXT", self._bounds(schema, _LONGEST)
        if held := values or often != "{0,}":
            rules = [f"/{_ANY}{often}/", rf"~/{_ANY}*{_escaped(self._tag)}{_ANY}*/"]
            rules += [rf"~/\s*[\[{{]{_ANY}*/"] * values
            text = self._rules.add("TEXT", " & ".join(rules))
        ends = self._form.ends if held else self._tag
        after = self._form.ends.partition(self._tag)[2]
        whole = self._rules.after_text(ends.rstrip(), text, empty=often.startswith("{0"))
        return self._rules.add("text", f"{whole} {json.dumps(after)}") if after else whole

    def _bounds(self, schema: Mapping[str, Any], longest: int = _MOST) -> str:
        """Return how many characters a text has."""
        least, most = (it if type(it := schema.get(f"{end}Length")) is int else None for end in ("min", "max"))
        if not 0 <= (least or 0) <= min(longest, _MOST if most is None else most):
            self._refuse(f"minLength {least} with maxLength {most}", least)
        return f"{{{least or 0},{'' if most is None or most > _MOST else most}}}"

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
        left = [as_json(options)]
        while left:
            for place in re.findall(r'"\$ref": "([^"]*)"', left.pop()):
                whole, kind, name, *_ = (*str(place).split("/", 3), "", "")
                name = name.replace("~1", "/").replace("~0", "~")
                known = self._root.get(kind) if whole == "#" and kind in ("$defs", "definitions") else None
                if not isinstance(known, dict) or name not in known:
                    return self._root
                if name not in reached.setdefault(kind, {}):
                    reached[kind][name] = known[name]
                    left.append(as_json(known[name]))
        return reached

    def _refuse_unknown(self, schema: Mapping[str, Any], known: set[str]) -> None:
        """Refuse keywords of a strict tool that hold nothing in this form."""
        if self._strict and (lacked := next((key for key in schema if key not in known), None)) is not None:
            self._refuse(lacked, lacked)

    def _refuse(self, what: str, value: object) -> NoReturn:
        field = "params.grammar.lark"
        reason = f"{self._name}: {what} cannot be held in calls of the form {self._form.name}"
        raise InvalidRequest(f"{field} does not compile: {reason}", field=field, value=value, limit=reason)


class _PythonRules(_ArgumentRules):
    """Rules of the arguments of one tool in Python."""

    def pairs(self) -> str:
        if unfit := [key for key in parameters(self._root)[0] if re.fullmatch(_KEY, key) is None]:
            self._refuse(f"a parameter named {unfit[0]!r}", unfit[0])
        return self._listed(self._root, json.dumps, f"/{_KEY}/", '"="')

    def _listed(self, schema: Mapping[str, Any], key: Callable[[str], str], others: str, sign: str) -> str:
        """Return the rule of arguments, or of an object's members, in the order of their schema."""
        named, required, further = parameters(schema)
        after = rest = value = ""
        if further is not False:
            value = self._rules.add("further", self._value(further))  # one within it would be written as often again
            unlike = rf" & ~/{_ANY}*\\{_ANY}*|['\"]?({'|'.join(map(_escaped, named))})['\"]?/" * bool(named)
            pair = f"{self._rules.add('KEY', others + unlike)} {sign} {value}"
            after, rest = f"({_COMMA} {pair})*", f"({pair} ({_COMMA} {pair})*)?"
        for name in reversed(named):
            told = value if value and named[name] is further else self._value(named[name])
            pair = self._rules.add("pair", f"{key(name)} {sign} {told}")
            first, optional = f"{pair} {after}", name not in required
            rest = self._rules.add("rest", f"{first} | {rest}" if optional and rest else f"({first}){'?' * optional}")
            after = self._rules.add("after", f"({_COMMA} {pair}){'?' * optional} {after}")
        return rest

    def _value(self, schema: Any) -> str:
        """Return the rule of a value in Python, or in JSON where only that holds all of its schema."""
        match schema:
            case {"$ref": str(place)} if len(schema) == 1 and place.startswith("#"):
                if place not in self._values:
                    at, self._values[place] = len(self._rules.lines), f"at_{len(self._rules.lines)}"
                    self._rules.lines.append("")  # before what it consists of, which may refer to it
                    self._rules.lines[at] = f"at_{at}: {self._value(found(place, self._root))}"
                return self._values[place]
            case {"anyOf": [_, *_] as parts} | {"allOf": [_] as parts} if len(schema) == 1:
                return f"({' | '.join(map(self._value, parts))})"
            case {"type": [_, *_] as types} if all(isinstance(it, str) for it in types):
                return f"({' | '.join(self._value({**schema, 'type': it}) for it in dict.fromkeys(types))})"
            case {"enum": [_, *_] as constants} if schema.keys() <= {"enum", "type"}:
                return self._either(constants)
            case {"type": "boolean" | "null" as word} if len(schema) == 1:
                return _WORDS[word]
            case {"type": "string"} if schema.keys() <= _OF_TEXTS:
                return self._rules.add("TEXT", _quoted(self._bounds(schema)))
            case {"type": "array", "items": items} if len(schema) == 2:
                item = self._rules.add("item", self._value(items))
                return f'"[" ({item} ({_COMMA} {item})*)? "]"'
            case {"type": "object"} if schema.keys() <= _OF_OBJECTS | {"x-guidance"}:
                return f'"{{" {self._listed(schema, lambda key: self._either([key]), _quoted("*"), _COLON)} "}}"'
        return self._json([schema if isinstance(schema, dict) else {}])

    def _either(self, constants: Sequence[Any]) -> str:
        return f"({' | '.join(json.dumps(text) for it in constants for text in (as_json(it), repr(it)))})"


def _quoted(often: str) -> str:
    return "/" + "|".join(rf"{it}([^\\{it}]|{_ESCAPE}){often}{it}" for it in "\"'") + "/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
