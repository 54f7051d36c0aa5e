"""How many shapes a guess has: the types that carry one, and the functions that find its paths from parents."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.shape.declared import Type, declared
from tests.shape.sources import FUNCTIONS, Function, Source, definitions

# A guess is tokens, and for each of them what it hangs from, how likely it is, or its rank among its siblings.
_TOKENS = re.compile(r"_?(open_|draft_|guessed_)?tokens?$")
_HANGS = re.compile(r"_?((open_|draft_)?parents?|children|(draft_)?probs?|ranks?|chances)$")
# A value with tokens and such a name is a chain of guesses.
_SAYS_SO = re.compile(r"Guess|Propos")
_PARENT = re.compile(r"_?(open_)?parents?(_row|_rows|_id)?$")
_STORES = frozenset({"append", "extend", "update", "setdefault"})


def guess_types(sources: Sequence[Source]) -> list[str]:
    """Return the types that carry a guess: those with fields for its parts, and values that hold one of these.

    A part is what a token hangs from, how likely it is, or its rank among its siblings.
    """
    types = declared(sources)
    own = [found for found in types if _carries(found)]
    names = [found.name for found in own]
    holders = [found for found in types if found.is_value and found not in own and found.mentions(names)]
    return sorted(map(str, own + holders))


def _carries(found: Type) -> bool:
    if not any(map(_TOKENS.match, found.field_names)):
        return False
    return any(map(_HANGS.match, found.field_names)) or (found.is_value and bool(_SAYS_SO.search(found.name)))


def parent_walkers(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Return by file the functions that find depths, paths or the like from parents.

    Such a function fills a container from its own entries for parents (`depths.append(1 + depths[parent])`), or climbs
    from a node to its parent (`row = parents[row - 1]`, `node = node.parent`).
    """
    found = defaultdict(list)
    for source in sources:
        for definition in definitions(source):
            if isinstance(definition.node, FUNCTIONS) and _walks(definition.node):
                found[source.path].append(f"{definition.name}:{definition.node.lineno}")
    return dict(found)


def _walks(function: Function) -> bool:
    own = list(_own_nodes(function))
    looked_up = {ast.unparse(node.value) for node in own if isinstance(node, ast.Subscript) and _by_parent(node)}
    stored = {container for node in own for container in _stored(node)}
    return bool(looked_up & stored) or any(map(_climbs, own))


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, less those of functions and classes within it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, (ast.ClassDef, *FUNCTIONS)):
            yield from _own_nodes(child)


def _by_parent(node: ast.Subscript) -> bool:
    return any(map(_is_parent, ast.walk(node.slice)))


def _stored(node: ast.AST) -> Iterator[str]:
    """Yield the containers that a statement or a call adds to."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        yield ast.unparse(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STORES:
        yield ast.unparse(node.func.value)


def _climbs(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        names = {ast.unparse(target) for target in node.targets}
    elif isinstance(node, ast.NamedExpr):
        names = {node.target.id}
    else:
        return False
    value = node.value
    if isinstance(value, ast.Subscript) and _is_parent(value.value):
        return any(ast.unparse(part) in names for part in ast.walk(value.slice) if isinstance(part, ast.expr))
    return isinstance(value, ast.Attribute) and _is_parent(value) and ast.unparse(value.value) in names


def _is_parent(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return bool(_PARENT.match(name))
