"""A start-up check that passed is not repeated by the same code for the same model; by any other it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.checks import passed
from outrider.engine.loading import selection
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
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


@pytest.mark.parametrize("changed", ["kernels", "torch", "code", "weights", "option", "format"])
def test_a_check_is_repeated_where_anything_differs(
    changed: str, checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    start(folder)
    options: dict[str, Any] = {}
    if changed == "kernels":
        monkeypatch.setattr(passed, "identity", lambda: "kernels of another processor")
    elif changed == "torch":
        monkeypatch.setattr(passed, "torch", SimpleNamespace(__version__="another"))
    elif changed == "code":
        monkeypatch.setattr(passed, "_SOURCES", [Path(__file__)])
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
