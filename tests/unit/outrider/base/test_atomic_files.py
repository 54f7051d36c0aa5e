"""Files that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

from outrider.base.atomic_files import atomic_write


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
