"""A drafting method is one module of `drafter.methods`, and nothing else has to know of it."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafter import methods
from drafter.methods import registry
from outrider.models.drafter_choice import choose_drafter, drafter_kinds
from outrider.models.hub import DEFAULT, DEFAULT_NAME
from outrider.protocol.errors import StartupError
from outrider.settings.drafter import DrafterSettings

METHOD = """
from drafter.methods.registry import drafter


class CopycatDrafter:
    pass


@drafter("copy-cat")
def make(settings, progress):
    return CopycatDrafter()
"""


@pytest.fixture
def another(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "copy_cat.py").write_text(METHOD)
    methods.__path__.append(str(tmp_path))
    yield
    methods.__path__.remove(str(tmp_path))
    sys.modules.pop("drafter.methods.copy_cat", None)
    registry._factories.pop("copy-cat", None)


def test_every_kind_is_a_module_of_its_name() -> None:
    """Kinds are found by reading the modules' names; a drafter process imports only the one that it needs."""
    for module in pkgutil.iter_modules(methods.__path__):
        importlib.import_module(f"{methods.__name__}.{module.name}")
    assert drafter_kinds() == registry._factories.keys()
    for kind, make in registry._factories.items():
        assert make.__module__ == f"drafter.methods.{kind.replace('-', '_')}"


def test_a_new_module_is_a_new_kind(another: None) -> None:
    assert choose_drafter("copy-cat", "default") == ("copy-cat", "")
    assert choose_drafter("suffix+copy-cat:folder", "default") == ("suffix+copy-cat", "folder")
    made = registry.make(DrafterSettings(kind="copy-cat"), print)
    assert type(made).__name__ == "CopycatDrafter"


@pytest.mark.parametrize("text", ["copy-cat", "sufix", "suffix+copy-cat", "Suffix", ""])
def test_what_is_neither_a_kind_nor_a_model_is_told_without_the_hub(text: str) -> None:
    with pytest.raises(StartupError, match=r"drafter is .*, must be a kind"):
        choose_drafter(text, "default")


@pytest.mark.parametrize(
    "text", ["eagle:/no/path", "suffix+eagle:nowhere", "medusa:~/nowhere", "medusa:~nobody-here/x", "model:./nowhere"]
)
def test_a_path_that_does_not_exist_is_told_with_its_kind(text: str) -> None:
    with pytest.raises(StartupError, match=f"there is nothing at {re.escape(text.partition(':')[2])}"):
        choose_drafter(text, "default")


@pytest.mark.parametrize("method", [["eagle"], None, 5, "eagle9"])
def test_a_card_that_names_no_kind_is_told(tmp_path: Path, method: object) -> None:
    (tmp_path / "card.json").write_text(json.dumps({"method": method}))
    with pytest.raises(StartupError, match=re.escape(f"its card.json names {method}")):
        choose_drafter(str(tmp_path), "default")


def test_a_path_that_exists_a_hub_id_and_a_number_of_layers_go_with_a_kind(tmp_path: Path) -> None:
    for text in (f"eagle:{tmp_path}", "model:org/small", "published:org/eagle", "early-exit:3", "eagle:default"):
        assert choose_drafter(text, "default") == tuple(text.split(":"))


@pytest.mark.parametrize("text", [DEFAULT, DEFAULT_NAME])
def test_a_model_drafts_by_its_name_alone(text: str) -> None:
    assert choose_drafter(text, "other") == ("model", text)


def test_a_kind_may_name_any_hub_id() -> None:
    assert choose_drafter("model:copy-cat", "default") == ("model", "copy-cat")
