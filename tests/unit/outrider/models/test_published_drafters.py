"""Published drafters are told from models by their files alone, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.models.drafter_choice import choose_drafter
from outrider.testing.toy_models import make_model
from tests.published import CASES


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_recognised_by_its_files(name: str, tmp_path: Path) -> None:
    folder = str(CASES[name](tmp_path))
    target = folder if name == "mimo-mtp" else "default"
    assert choose_drafter(folder, target) == ("published", folder)


def test_a_model_is_a_model(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path, seed=1))
    assert choose_drafter(folder, folder) == ("model", folder)


def test_a_target_with_a_module_is_a_model_for_other_targets(tmp_path: Path) -> None:
    folder = str(CASES["mimo-mtp"](tmp_path))
    assert choose_drafter(folder, "default") == ("model", folder)


@pytest.mark.parametrize("damage", ["no config", "no weights", "short header", "no zip"])
def test_a_damaged_folder_is_left_to_the_loader_of_models(tmp_path: Path, damage: str) -> None:
    if damage != "no config":
        (tmp_path / "config.json").write_text(json.dumps({"architectures": None}))
    if damage in ("no config", "short header"):
        (tmp_path / "model.safetensors").write_bytes(b"123")
    if damage == "no zip":
        (tmp_path / "pytorch_model.bin").write_bytes(b"fc.weight")
    assert choose_drafter(str(tmp_path), "default") == ("model", str(tmp_path))


def test_it_joins_other_kinds() -> None:
    assert choose_drafter("suffix+published:folder", "default") == ("suffix+published", "folder")
