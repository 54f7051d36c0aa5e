"""The folder of `outrider up` between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.launch.state import state_folder
from outrider.protocol.errors import StartupError


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_that_cannot_be_made_is_told_with_what_to_set(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller of a run without --state-dir has named none."""
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    monkeypatch.setenv("OUTRIDER_HOME", str(home))
    with (
        pytest.raises(StartupError, match=r"cannot use .*: Not a directory; .* OUTRIDER_HOME$"),
        state_folder(str(home / "state") if named else "", 50050),
    ):
        pass
