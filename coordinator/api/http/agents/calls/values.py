"""Values of arguments that are written as text between tags, by the schema of their tool."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def as_text(value: Any) -> str:
    """Return a value as chat templates write it between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parameters(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], Any]:
    """Return the parameters that a tool declares, the names of required ones, and the schema of further ones."""
    tool = {**found(schema["$ref"], schema), **schema} if "$ref" in schema else schema
    declared, required = tool.get("properties"), tool.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return declared if isinstance(declared, dict) else {}, names, tool.get("additionalProperties", True)


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


def kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a value may have."""
    with suppress(RecursionError):
        return frozenset(map(kind_of, choices(schema, root))) or frozenset({"string"})
    return frozenset({"string"})


def read(text: str, wanted: Collection[str]) -> str:
    """Return the JSON of a value that was written as text: of a wanted type, if it has one, or a string."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text, parse_constant=_refuse) if {*wanted} != {"string"} else text
        kind = _KINDS.get(type(value), "null")
        more = "integer" if isinstance(value, float) and value.is_integer() else kind.replace("integer", "number")
        if kind != "string" and not {kind, more}.isdisjoint(wanted):
            return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(name)
