"""A home for the files that tests index."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a folder of the test's own for files that are indexed and converted, with the kernels that are compiled."""
    kernels = Path(os.environ.get("OUTRIDER_HOME") or Path.home() / ".cache" / "outrider") / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
