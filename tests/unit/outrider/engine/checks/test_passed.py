"""A start-up check that passed is not repeated by the same code for the same model; by any other it is."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.checks import passed
from outrider.engine.loading import selection
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.native import build
from outrider.testing.toy_models import make_model

SKIPPED = "start-up check skipped: passed before with these kernels on this processor"


def start(folder: Path, **options: Any) -> list[str]:
    said: list[str] = []
    chosen: dict[str, Any] = {"device": "cpu", "kv_tokens": 512, "threads": 1} | options
    load_model(str(folder), EngineOptions(**chosen), said.append)
    return said


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The parts of the check that ran. Records are kept in a folder of the test's own."""
    ran: list[str] = []
    monkeypatch.setattr(passed, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(passed, "_SMALLEST", 0)
    for part in ("check_supported", "check_windows", "check_logits"):
        check = getattr(selection, part)
        monkeypatch.setattr(selection, part, lambda *given, c=check, n=part: (ran.append(n), c(*given))[1])
    return ran


def test_a_passed_check_is_skipped_and_said_so(checks: list[str], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    assert SKIPPED not in start(folder)
    assert checks == ["check_supported", "check_windows", "check_logits"]
    assert SKIPPED in start(folder)
    assert len(checks) == 3


@pytest.mark.parametrize("changed", ["kernels", "tiles", "torch", "gguf", "code", "weights", "option", "format"])
def test_a_check_is_repeated_where_anything_differs(
    changed: str, checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    start(folder)
    options: dict[str, Any] = {}
    if changed == "kernels":
        replaced = tmp_path / Path(build.library()._name).name  # other kernels by the same name
        replaced.write_bytes(b"others")
        others = SimpleNamespace(_name=str(replaced), outrider_tiles=build.library().outrider_tiles)
        monkeypatch.setattr(build, "library", lambda: others)
    elif changed == "tiles":
        others = SimpleNamespace(_name=build.library()._name, outrider_tiles=lambda: 2)
        monkeypatch.setattr(build, "library", lambda: others)
    elif changed in ("torch", "gguf"):
        monkeypatch.setattr(passed, "version", lambda name: "another" if name == changed else version(name))
    elif changed == "code":
        monkeypatch.setattr(passed, "_SOURCES", [b"other"])
    elif changed == "weights":
        make_model(folder, seed=2)
    elif changed == "option":
        options = {"kv_dtype": "bfloat16"}
    else:
        options = {"dtype": "bfloat16"}
    assert SKIPPED not in start(folder, **options)
    assert checks.count("check_logits") == 2


def test_a_check_that_failed_is_not_recorded(
    checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model", seed=1)

    def differs(*_: object) -> None:
        raise selection.Differs("planted")

    with monkeypatch.context() as planted:
        planted.setattr(selection, "check_windows", differs)
        assert any("planted" in line for line in start(folder))
    assert not list(tmp_path.glob("home/checked/*"))
    assert SKIPPED not in start(folder)


def test_a_folder_that_cannot_be_written_is_no_obstacle(checks: list[str], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    (tmp_path / "home").write_text("a file")
    assert any(line.startswith("the next start repeats the start-up check") for line in start(folder))
    assert SKIPPED not in start(folder)


@pytest.mark.parametrize("error", [RuntimeError("no home"), OSError("not readable")])
def test_a_machine_without_a_home_checks_at_every_start(
    error: Exception, checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise error

    monkeypatch.setattr(passed, "home", missing)
    assert SKIPPED not in start(make_model(tmp_path / "model", seed=1))
    assert "check_logits" in checks


def test_a_folder_that_cannot_be_read_is_no_obstacle(
    checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    monkeypatch.setattr(passed, "home", lambda: tmp_path / ("x" * 300))  # ENAMETOOLONG: root may read any folder
    assert any(line.startswith("the next start repeats the start-up check") for line in start(folder))
