"""Values of arguments that are written as text between tags, by the schema of their tool."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

as_json = partial(json.dumps, ensure_ascii=False)
_HEX = "[0-9a-fA-F]"
_PIECE = re.compile(rf"\\(?:([0-7]{{1,3}})|x({_HEX}{{2}})|u({_HEX}{{4}})|U({_HEX}{{8}})|.)|[^\\]+", re.DOTALL)
_ESCAPES = {r"\'": "'", "\\\n": "", r"\a": r"\u0007", r"\v": r"\u000b"} | {f"\\{it}": f"\\{it}" for it in 'bfnrt"\\'}
_LITERAL = re.compile(r"""(['"])((?>(?:\\.|(?!\1)[^\\])*))\1|\b(?:True|False|None)\b|[()]|,(?=\s*[\])}])""", re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
KINDS = frozenset([*_KINDS.values(), "null"])


def as_text(value: Any) -> str:
    """Return a value as chat templates write it between tags."""
    return value if isinstance(value, str) else as_json(value)


def parameters(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], Any]:
    """Return the parameters that a tool names, the names of required ones, and the schema of further ones."""
    tool = {**found(schema["$ref"], schema), **schema} if "$ref" in schema else schema
    declared, required = tool.get("properties"), tool.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    known, further = declared if isinstance(declared, dict) else {}, tool.get("additionalProperties", True)
    return known | {name: further for name in names if name not in known}, names, further


def choices(schema: Any, root: Mapping[str, Any], seen: set[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield schemas of one type, or of a constant, one of which a value follows. Without any type it is a text."""
    schema, seen = schema if isinstance(schema, dict) else {}, set() if seen is None else seen
    all_of = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    parts = schema.get("anyOf") or schema.get("oneOf") or (all_of if len(all_of) == 1 else None)
    if (place := schema.get("$ref")) is not None:
        parts = [found(place, root)] if str(place) not in seen else []
        seen.add(str(place))
    if isinstance(parts, list):
        for part in parts:
            yield from choices(part, root, seen)
    elif "const" in schema or isinstance(schema.get("enum"), list):
        yield from ({"const": it} for it in ([schema["const"]] if "const" in schema else schema["enum"]))
    else:
        inner = "object" if "properties" in schema else "array" if "items" in schema else "string"
        types = schema.get("type") or [*map(kind_of, choices(all_of[0], root, seen) if all_of else ())] or inner
        yield from ({**schema, "type": it} for it in (types if isinstance(types, list) else [types]))


def found(place: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that a reference names; any text where there is none."""
    part: Any = root
    for name in str(place).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, dict) else {}


def kind_of(choice: Mapping[str, Any]) -> str:
    """Return the type of a schema from `choices`."""
    return _KINDS.get(type(choice["const"]), "null") if "const" in choice else str(choice["type"])


def wanted(schema: Any, root: Mapping[str, Any]) -> tuple[frozenset[str], dict[str, str]]:
    """Return the types that a value may have, and the constants that it may be, as JSON by their texts."""
    options = list[dict[str, Any]]()
    with suppress(RecursionError):
        options += choices(schema, root)
    constants = {as_text(it["const"]): as_json(it["const"]) for it in options if "const" in it}
    return frozenset(map(kind_of, options)) or frozenset({"string"}), constants


def from_python(text: str) -> str:
    """Return a value in Python, or in JSON, as one in JSON."""
    return _LITERAL.sub(lambda it: f'"{_PIECE.sub(_piece, it[2])}"' if it[1] else _WORDS.get(it[0], ""), text.strip())


def _piece(found: re.Match[str]) -> str:
    with suppress(ValueError, OverflowError):
        return json.dumps(chr(int("".join(filter(None, found.groups())), 8 if found[1] else 16)))[1:-1]
    return _ESCAPES.get(found[0], as_json(found[0])[1:-1])


def read(text: str, kinds: Collection[str]) -> str:
    """Return the JSON of a value that was written as text: of one of these types, if it has one, or a string."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text, parse_constant=_refuse) if {*kinds} != {"string"} else text
        kind = _KINDS.get(type(value), "null")
        more = "integer" if isinstance(value, float) and value.is_integer() else kind.replace("integer", "number")
        if kind != "string" and not {kind, more}.isdisjoint(kinds):
            return text.strip()
    return as_json(text)


def _refuse(name: str) -> None:
    raise ValueError(name)
