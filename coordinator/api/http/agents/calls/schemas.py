"""JSON schemas as parts of grammars: without notes, moved to other places, with the usual white space."""

from __future__ import annotations

import json
import re
from typing import Any

from outrider.speculation.grammar import CONSTANTS, NAMED, WHITESPACE

_NOTES = ("$comment", "default", "description", "examples", "title")
_FOREIGN = re.compile(r'"\$ref": "[^#]')


def guided(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the usual white space, unless it has its own."""
    own: Any = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**WHITESPACE, **own} if isinstance(own, dict) else own}


def placed(schema: Any, place: str) -> Any:
    """Return a schema for a place within another, without an id that its references do not need."""
    return bare({key: it for key, it in schema.items() if key != "$id" or _FOREIGN.search(json.dumps(schema))}, place)


def bare(schema: Any, place: str = "#", *, named: bool = False) -> Any:
    """Return a part of a schema without notes, which count for a grammar's size. References begin where its root is."""
    if isinstance(schema, dict):
        return {
            name: place + part[1:]
            if name == "$ref" and isinstance(part, str) and part[:2] in ("#", "#/")
            else part
            if name in CONSTANTS and not named
            else bare(part, place, named=name in NAMED and not named)
            for name, part in schema.items()
            if named or name not in _NOTES
        }
    return [bare(part, place) for part in schema] if isinstance(schema, list) else schema
