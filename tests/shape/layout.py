"""Sizes: files and folders, classes, lines, names."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from tests.shape.sources import FUNCTIONS, Source, classes

LONG_FILE_LINES = 400
BIG_CLASS_METHODS = 15
# Names that several classes may share. Each needs a reason.
SHARED_NAMES: frozenset[str] = frozenset()


def modules_by_folder(sources: Sequence[Source]) -> list[tuple[int, str]]:
    """Return how many Python files lie in each folder, `__init__.py` among them, the fullest first."""
    return sorted(((number, folder) for folder, number in Counter(s.folder for s in sources).items()), reverse=True)


def long_files(sources: Sequence[Source]) -> list[str]:
    found = sorted(((source.lines, source.path) for source in sources), reverse=True)
    return [f"{path}: {lines} lines" for lines, path in found if lines > LONG_FILE_LINES]


def lines_of(sources: Sequence[Source], packages: Collection[str]) -> int:
    """Count all lines, blank ones and comments too."""
    return sum(source.lines for source in sources if source.path.split("/")[0] in packages)


def big_classes(sources: Sequence[Source]) -> list[str]:
    """Return the classes with many functions in their bodies, whatever these are decorated with."""
    counted = ((sum(isinstance(part, FUNCTIONS) for part in node.body), s, node) for s, node in classes(sources))
    big = sorted(((n, f"{s.path}:{node.lineno} {node.name}") for n, s, node in counted if n > BIG_CLASS_METHODS))
    return [f"{where}: {number} methods" for number, where in reversed(big)]


def repeated_class_names(sources: Sequence[Source], shared: Collection[str] = SHARED_NAMES) -> list[str]:
    """Return the names that more than one class at the top of a module has."""
    places = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.path)
    return [
        f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1 and name not in shared
    ]
