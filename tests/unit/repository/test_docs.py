"""The documentation against the repository: links, the index, examples, and the tests that docs/invariants.md names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from drafter.published.__main__ import app as drafters
from outrider.cli.app import app
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings
from tests.cluster import ROOT
from tests.unit.repository.test_threat_model import functions

PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")})
INVARIANTS = ROOT / "docs" / "invariants.md"
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```python$(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"\boutrider ((?:serve|bench|models|drafters) )?([a-z]+)( [^`#\n]*)")
_SECTION = re.compile(r"^## Invariant (\d+): .+?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_TEST = re.compile(r"^\| `(tests/[\w/]+\.py)::(\w+)` \|", re.MULTILINE)
_LOGGED = re.compile(r"\b[Ll]og(?:s|ged)?(?: as| says)? (`[^`]+`(?:(?:, | and | or )`[^`]+`)*)")
_PRINTED = re.compile(r"`progress: ([^`]+)`")
_EVENT = re.compile(r'"event": "([^"]+)"')
_LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
_PROGRESS = {"progress", "report_progress"}
_CITED = re.compile(r"Invariant (\d+)")


def sections() -> dict[int, str]:
    """Return the text of each invariant by its number."""
    return {int(found[1]): found[0] for found in _SECTION.finditer(INVARIANTS.read_text(encoding="utf-8"))}


def anchors(page: Path) -> set[str]:
    """Return the fragments that GitHub gives to the headings of a page."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in _HEADING.findall(text)}


def citations() -> Iterator[tuple[str, int]]:
    """Yield every module of code and tests with the number of an invariant that it cites."""
    for top in ("outrider", "drafter", "verifier", "coordinator", "loadtest", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            if path != Path(__file__):
                for number in _CITED.findall(path.read_text(encoding="utf-8")):
                    yield str(path.relative_to(ROOT)), int(number)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    for path, anchor in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is missing"
        assert not anchor or anchor in anchors(target), f"{path} has no heading #{anchor}"


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / path).resolve() for path, _ in _LINK.findall(index.read_text(encoding="utf-8"))}
    pages = set((ROOT / "docs").rglob("*.md")) - {index}
    assert pages <= listed, sorted(str(page.relative_to(ROOT)) for page in pages - listed)


def test_names_that_examples_import_exist() -> None:
    texts = [(page, example) for page in PAGES for example in _PYTHON.findall(page.read_text(encoding="utf-8"))]
    texts += [(path, path.read_text(encoding="utf-8")) for path in (ROOT / "examples").glob("*.py")]
    for path, text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("outrider"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    found = hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")
                    assert found, f"{path.name}: {node.module}.{name.name}"
    assert len(texts) > 5


def flags() -> dict[str, set[str]]:
    """Return the flags of each command and service by its words after `outrider`."""
    found: dict[str, set[str]] = {}
    commands: list[tuple[str, Any]] = [
        ("", typer.main.get_command(app)),
        ("drafters", typer.main.get_command(drafters)),
    ]
    while commands:
        words, command = commands.pop()
        commands += [(f"{words} {name}".strip(), each) for name, each in getattr(command, "commands", {}).items()]
        found[words] = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    for name, settings in (
        ("coordinator", CoordinatorSettings),
        ("drafter", DrafterSettings),
        ("verifier", VerifierSettings),
    ):
        found[f"serve {name}"] = {"--" + field.replace("_", "-") for field in settings.model_fields}
    return found


def test_flags_of_commands_exist() -> None:
    known, seen = flags(), 0
    for page in PAGES:
        for group, name, rest in _COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", "")):
            given = re.findall(r"(?<!\S)--[a-z][\w-]*", rest)
            if given and group + name in known:
                assert set(given) <= known[group + name] | {"--help"}, f"{page.name}: outrider {group}{name}"
                seen += len(given)
    assert seen > 20


def quoted(pattern: re.Pattern[str]) -> dict[str, str]:
    """Return what pages quote as a line of the log, or of standard output, and the page of each."""
    found: dict[str, str] = {}
    for page in PAGES:
        for spans in pattern.findall(" ".join(page.read_text(encoding="utf-8").split())):
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", spans) or [spans], page.name)
    return found


def said(names: set[str]) -> set[str]:
    """Return what the sources log or print; of a text that is put together its beginning."""
    found = set()
    for top in ("outrider", "drafter", "verifier", "coordinator", "loadtest"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and node.args and _name(node.func) in names:
                    text = node.args[0]
                    first = text.values[0] if isinstance(text, ast.JoinedStr) else text
                    if isinstance(first, ast.Constant):
                        found.add(str(first.value))
    return found


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")


def test_lines_of_the_log_that_pages_quote_are_logged() -> None:
    lines, events = quoted(_LOGGED) | quoted(_EVENT), said(_LEVELS | {"level"})
    assert len(lines) > 5
    assert not {line: page for line, page in lines.items() if line not in events}


def test_progress_that_pages_quote_is_printed() -> None:
    lines, printed = quoted(_PRINTED), said(_PROGRESS)
    assert lines
    assert not {
        line: page for line, page in lines.items() if line.removesuffix(" …") not in {p.strip() for p in printed}
    }


def test_invariants_are_numbered_in_order() -> None:
    assert list(sections()) == list(range(1, len(sections()) + 1))
    assert len(sections()) > 8


@pytest.mark.parametrize("number", sections())
def test_every_invariant_names_tests_that_exist(number: int) -> None:
    named = _TEST.findall(sections()[number])
    assert named
    assert len(named) == sections()[number].count("`tests/"), "a test is named as file::function"
    for path, name in named:
        assert name in functions(path), f"{path} has no {name}"


def test_every_citation_has_a_section_that_names_the_citing_test() -> None:
    cited = list(citations())
    assert cited
    for path, number in cited:
        assert number in sections(), f"{path} cites Invariant {number}"
        if path.startswith("tests/"):
            assert f"`{path}::" in sections()[number], f"{path} cites Invariant {number}, which does not name it"
