"""The folder of `outrider up` between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.launch import state
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


def test_keys_are_generated_once_and_are_their_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    with state_folder(str(folder), 50050) as kept:
        first, other = kept.key("fleet-key").read_text(), kept.key("drafter-key").read_text()
        kept.key("fleet-key").chmod(0o644)
        kept.key("drafter-key").write_text("")  # as a run that was interrupted may have left it
    with state_folder(str(folder), 50051) as kept:
        assert kept.kept
        assert kept.key("fleet-key").read_text() == first
        assert kept.key("drafter-key").read_text() not in ("", first, other)
        modes = [path.stat().st_mode & 0o777 for path in (folder, kept.data, kept.key("fleet-key"), folder / "lock")]
        assert modes == [0o700, 0o700, 0o600, 0o600]
    assert len(first) > 40


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run on the same port gets a folder that ends with it, unless it names one."""
    monkeypatch.setattr(state, "LEAVING_S", 0.0)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    with state_folder("", 50050) as first, state_folder("", 50050) as second, state_folder("", 0) as third:
        assert [one.kept for one in (first, second, third)] == [True, False, False]
        assert first.folder == tmp_path / "up" / "50050"
        assert second.data.is_dir()
        with pytest.raises(StartupError, match="in use by another"), state_folder(str(first.folder), 50050):
            pass
    assert first.data.is_dir()
    assert not second.folder.exists()
    with state_folder(str(first.folder), 1) as again:
        assert again.kept
