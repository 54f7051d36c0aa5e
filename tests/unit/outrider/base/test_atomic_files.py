"""Files that are replaced as a whole."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from outrider.base.atomic_files import atomic_write, room_for, scratch_folder
from outrider.protocol.errors import StartupError


def test_two_writers_of_one_file_leave_each_other_alone(tmp_path: Path) -> None:
    """In containers that share a volume, both processes may have the same id."""
    path = tmp_path / "index.json"
    with atomic_write(path) as first:
        first.write_text("first")
        with atomic_write(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refused, room_for(tmp_path / "outer"), room_for(tmp_path / "inner"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(refused.value).count("no room for") == 1


def test_a_file_system_without_locks_has_temporary_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with scratch_folder("outrider-test-") as (folder, _), scratch_folder("outrider-test-") as (other, _):
        assert folder.is_dir()
        assert other.is_dir()
