"""The files that are measured: product modules as syntax trees, the contract and the documentation.

The product is what import-linter calls the root packages. A folder with generated stubs (`*_pb2.py`) is left out.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_DOCUMENT_FOLDERS = ("docs", "proto", "deploy", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One file: its path from the root of the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def module(self) -> str:
        """The name to import it by."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


@dataclass(frozen=True)
class Definition:
    """A class or a function, where it is, and the class around it."""

    source: Source
    name: str  # qualified within the module
    node: ast.ClassDef | Function
    owner: ast.ClassDef | None

    def __str__(self) -> str:
        return f"{self.source.path}:{self.node.lineno} {self.name}"


def definitions(source: Source) -> Iterator[Definition]:
    """Yield every class and function of a module, nested ones too."""
    yield from _within(source, source.tree, "", None)


def _within(source: Source, node: ast.AST, prefix: str, owner: ast.ClassDef | None) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *FUNCTIONS)):
            name = f"{prefix}{child.name}"
            yield Definition(source, name, child, owner)
            yield from _within(source, child, f"{name}.", child if isinstance(child, ast.ClassDef) else None)
        else:
            yield from _within(source, child, prefix, owner)


def classes(sources: Iterable[Source]) -> list[tuple[Source, ast.ClassDef]]:
    """Return the classes at the top of modules, and those within other classes."""
    return [
        (found.source, found.node)
        for source in sources
        for found in definitions(source)
        if isinstance(found.node, ast.ClassDef)
    ]


def packages() -> tuple[str, ...]:
    """Return the names of the product's packages."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return tuple(settings["tool"]["importlinter"]["root_packages"])


@cache
def generated_folders() -> frozenset[Path]:
    return frozenset(path.parent for package in packages() for path in (ROOT / package).rglob("*_pb2.py"))


def product_files() -> list[Path]:
    found = (path for package in packages() for path in sorted((ROOT / package).rglob("*.py")))
    return [path for path in found if path.parent not in generated_folders()]


def _read(paths: Iterable[Path]) -> tuple[Source, ...]:
    return tuple(Source(str(path.relative_to(ROOT)), path.read_text()) for path in paths)


@cache
def product() -> tuple[Source, ...]:
    return _read(product_files())


@cache
def contract() -> tuple[Source, ...]:
    return _read(sorted((ROOT / "proto").rglob("*.proto")))


@cache
def documents() -> tuple[Source, ...]:
    inside = (path for folder in _DOCUMENT_FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))
    return _read([*sorted(ROOT.glob("*.md")), *inside])
