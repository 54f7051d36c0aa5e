"""How often sampling parameters are turned from one form into another."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.shape.declared import Type, declared
from tests.shape.sources import FUNCTIONS, Definition, Function, Source, definitions

_MESSAGE = "SamplingParams"  # of the contract; its fields are what sampling parameters are
_ENOUGH = 5  # of them: a type, a call or a signature with so many carries sampling parameters
_PLAIN = frozenset({"str", "bytes", "dict", "Mapping", "Json"})
_TEXT = "text or a mapping"


@dataclass(frozen=True)
class _Forms:
    """The forms that sampling parameters have; a name of the contract begins with a dot."""

    fields: frozenset[str]
    carriers: frozenset[str]
    holders: dict[str, list[str]]  # types with a carrier in a field; the fields


def conversions(sources: Sequence[Source]) -> list[str]:
    """Return the functions that turn sampling parameters from one form into another.

    The forms are: a type with their fields, text or a mapping, and the values one by one. Most functions show it in
    their signatures; others write most fields out, as keywords of such a type or as keys of a mapping.
    """
    forms = _forms(declared(sources))
    modules = [source for source in sources if source.path.endswith(".py")]
    return [
        f"{definition}: {how}"
        for source in modules
        for definition in definitions(source)
        if isinstance(definition.node, FUNCTIONS) and (how := _conversion(definition, definition.node, forms))
    ]


def _forms(types: Sequence[Type]) -> _Forms:
    contract = next(found for found in types if found.is_message and found.name == _MESSAGE)
    direct = [found for found in types if len(found.field_names & contract.field_names) >= _ENOUGH]
    names = {found.name for found in direct}
    direct += [found for found in types if names.intersection(found.bases)]
    carriers = frozenset(f".{found.name}" if found.is_message else found.name for found in direct)
    plain = [name for name in carriers if not name.startswith(".")]
    holders = {found.name: held for found in types if not found.is_message and (held := found.mentions(plain))}
    return _Forms(contract.field_names, carriers, holders)


def _conversion(definition: Definition, function: Function, forms: _Forms) -> str:
    """Return from what to what a function converts. Empty: it does not."""
    owner = definition.owner.name if definition.owner else ""
    taken = {name for arg in _arguments(function) for name in _named(arg.annotation, definition.source)}
    given = set(_named(function.returns, definition.source))
    if owner in forms.holders and _touches(function, forms.holders[owner]):
        if _is_plain(function.returns) and not taken and not function.decorator_list:
            return f"{owner} → {_TEXT}"
        if owner in given and taken & _PLAIN:
            return f"{_TEXT} → {owner}"
    sources, results = taken & forms.carriers, given & forms.carriers
    if sources and results - sources:
        return f"{', '.join(sorted(sources))} → {', '.join(sorted(results))}"
    return _spelt_out(function, forms)


def _arguments(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _named(annotation: ast.expr | None, source: Source) -> Iterator[str]:
    """Yield the types that an annotation names; a dot before those that come from generated stubs."""
    for node in ast.walk(annotation) if annotation else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f".{node.attr}" if node.value.id in _stubs(source) else node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def _stubs(source: Source) -> set[str]:
    """Return the names by which a module knows generated stubs."""
    return {
        alias.asname or alias.name
        for node in source.tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.endswith("_pb2")
    }


def _is_plain(annotation: ast.expr | None) -> bool:
    outer = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(outer, ast.Name) and outer.id in _PLAIN


def _touches(function: Function, fields: Sequence[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr in fields:
            return True
        if isinstance(node, ast.Constant) and node.value in fields:
            return True
    return False


def _spelt_out(function: Function, forms: _Forms) -> str:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            names = {str(keyword.arg) for keyword in node.keywords}
            what = ast.unparse(node.func).rpartition(".")[2]
        elif isinstance(node, ast.Dict):
            names = {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
            what = _TEXT
        else:
            continue
        if len(names & forms.fields) >= _ENOUGH and what in {*forms.carriers, _TEXT}:
            return f"one by one → {what}"
    return ""
