"""SECURITY.md says which test shows what: every one of them must be there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.cluster import ROOT

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_ROW = re.compile(r"^\|(?!-|\s*(?:attempt|version)\b)(.+)\|$", re.MULTILINE)


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("path", "name"), sorted(set(_NAMED.findall(PAGE))))
def test_every_test_that_is_named_is_there(path: str, name: str) -> None:
    assert (ROOT / path).exists(), path
    assert not name or name in functions(path), f"{path} has no {name}"


def test_every_attempt_is_shown_by_a_test() -> None:
    model = PAGE[PAGE.index("## Threat model") :]
    rows = _ROW.findall(model)
    assert len(rows) > 25
    for row in rows:
        assert _NAMED.search(row.rpartition("|")[2]), row


@pytest.mark.parametrize("page", ["README.md", "docs/security.md"])
def test_it_is_found_from(page: str) -> None:
    assert "SECURITY.md)" in (ROOT / page).read_text(encoding="utf-8")
