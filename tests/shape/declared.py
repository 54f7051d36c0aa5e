"""Types as they are declared: classes of the product with their fields, and messages of the contract with theirs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.shape.sources import FUNCTIONS, Source, classes

_VALUE_BASES = ("NamedTuple", "TypedDict", "BaseModel")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PART = re.compile(r"[{};]|[^{};]+")
_OPENING = re.compile(r"\s*(message|oneof|enum|service|rpc)\s+(\w+)")
_FIELD = re.compile(r"\s*(?:repeated\s+|optional\s+)?(map<[^>]*>|[\w.]+)\s+(\w+)\s*=\s*\d+")


@dataclass(frozen=True)
class Type:
    """A class or a message; its fields with their types as these are written."""

    where: str
    name: str
    fields: tuple[tuple[str, str], ...]
    bases: tuple[str, ...] = ()
    is_value: bool = True  # a dataclass or the like: it is passed on and has no life of its own
    is_message: bool = False

    @property
    def field_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.fields)

    def mentions(self, names: Iterable[str]) -> list[str]:
        """Return the fields whose types name one of these types."""
        wanted = set(names)
        return [field for field, written in self.fields if wanted & set(re.findall(r"\w+", written))]

    def __str__(self) -> str:
        return f"{self.where} {self.name}"


def declared(sources: Iterable[Source]) -> list[Type]:
    """Return the classes of modules and the messages of `.proto` files."""
    found: list[Type] = []
    for source in sources:
        found.extend(_messages(source) if source.path.endswith(".proto") else _classes(source))
    return found


def _classes(source: Source) -> Iterator[Type]:
    for _, node in classes([source]):
        bases = tuple(ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
        marks = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for mark in node.decorator_list}
        is_value = "dataclass" in marks or not set(bases).isdisjoint(_VALUE_BASES)
        yield Type(f"{source.path}:{node.lineno}", node.name, tuple(_fields(node)), bases, is_value)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield what the body annotates and what `__init__` sets, with its annotation where it has one."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id, ast.unparse(part.annotation)
        elif isinstance(part, FUNCTIONS) and part.name == "__init__":
            yield from _set_by(part)


def _set_by(function: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(function):
        targets: Sequence[ast.expr]
        if isinstance(node, ast.AnnAssign):
            targets, written = [node.target], ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign):
            targets, written = node.targets, ""
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, written


def _messages(source: Source) -> list[Type]:
    found: list[Type] = []
    blocks: list[tuple[str, str, list[tuple[str, str]]]] = []  # kind, name, fields
    statement = ""
    for part in _PART.findall(_COMMENT.sub("", source.text)):
        if part == "{":
            opening = _OPENING.match(statement)
            blocks.append((opening[1], opening[2], []) if opening else ("", "", []))
        elif part == "}":
            kind, name, fields = blocks.pop()
            if kind == "message":
                found.append(Type(source.path, name, tuple(fields), is_message=True))
        elif part == ";" and (field := _FIELD.match(statement)):
            around = next(block for block in reversed(blocks) if block[0] != "oneof")
            around[2].append((field[2], field[1]))
        statement = part if part not in "{};" else ""
    return found
