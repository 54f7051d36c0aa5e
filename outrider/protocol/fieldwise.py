"""Dataclasses as plain values, field by field: for stored records, request bodies, command-line flags and messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

KEY = "key"  # in a field's metadata: its name among plain values; empty: it is left out


def to_plain(value: Any) -> Any:
    """Return what JSON can hold: dataclasses as objects, enums by name, mappings as lists of pairs."""
    if is_dataclass(value):
        kind: Any = type(value)
        return {key: to_plain(getattr(value, name)) for key, name, _ in _keyed_fields(kind)}
    if isinstance(value, Enum):
        return value.name
    return list(value.items()) if isinstance(value, Mapping) else value


def from_plain(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return a dataclass with the given fields. Absent ones take their defaults, unknown names are ignored."""
    known: Any = kind
    return kind(**{name: _typed(hint, given[key]) for key, name, hint in _keyed_fields(known) if key in given})


def _typed(hint: Any, value: Any) -> Any:
    """Return a plain value as the type that a field is declared with; wrong types are left to the checks."""
    if NoneType in get_args(hint):
        return None if value is None else _typed(get_args(hint)[0], value)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return tuple(_typed(item, one) for one in value) if is_dataclass(item) else tuple(value)
    if get_origin(hint) is Mapping:
        key, item = get_args(hint)
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else value
        return {key(name): item(one) for name, one in pairs}
    if not isinstance(hint, type) or isinstance(value, hint):
        return value
    if issubclass(hint, Enum):
        return hint[value.upper()] if isinstance(value, str) else hint(value)
    return from_plain(hint, value) if is_dataclass(hint) else value


@cache
def _keyed_fields(kind: Any) -> list[tuple[str, str, Any]]:
    """Return the key of each field, its name and its type."""
    hints = get_type_hints(kind)
    keys = {field.name: field.metadata.get(KEY, field.name) for field in fields(kind)}
    return [(key, name, hints[name]) for name, key in keys.items() if key]
