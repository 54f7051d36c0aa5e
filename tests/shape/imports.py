"""Import cycles, between modules and between the parts of a package.

Every import statement counts, also one within a function, and `import_module` with a name written out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.shape.sources import Source

Graph = Mapping[str, Iterable[str]]


def imports(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Return for each module those of `sources` that it imports."""
    known = {source.module for source in sources}
    return {source.module: set(_imported(source, known)) - {source.module} for source in sources}


def _imported(source: Source, known: set[str]) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(source, node)
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        else:
            continue
        yield from (name for name in names if name in known)


def _base(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.module.split(".") if source.is_package else source.module.split(".")[:-1]
    up = package[: len(package) - node.level + 1]
    return ".".join([*up, *([node.module] if node.module else [])])


def cycles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes that reach each other (Tarjan's strongly connected components), largest first."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            at = stack.index(node)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in order:
            visit(node)
    return sorted(found, key=len, reverse=True)


def package_cycles(graph: Graph) -> list[list[str]]:
    """Return the cycles among the children of each package, a child standing for all that lies within it."""
    layers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for importer, imported in graph.items():
        for other in imported:
            if parted := _parting(importer, other):
                package, mine, its = parted
                layers[package][mine].add(its)
    return [cycle for layer in layers.values() for cycle in cycles(layer)]


def _parting(one: str, other: str) -> tuple[str, str, str] | None:
    """Return the package that holds both, and its children that hold one each. None: one lies within the other."""
    first, second = one.split("."), other.split(".")
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if shared in (len(first), len(second)):
        return None
    return ".".join(first[:shared]), ".".join(first[: shared + 1]), ".".join(second[: shared + 1])
