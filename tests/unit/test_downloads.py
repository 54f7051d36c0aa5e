"""What is downloaded is held against its digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from outrider.errors import StartupError
from outrider.models import check_digest


def test_another_file_than_the_released_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    check_digest(path, hashlib.sha256(b"weights").hexdigest())
    path.write_bytes(b"other weights")
    with pytest.raises(StartupError, match="is not the file"):
        check_digest(path, hashlib.sha256(b"weights").hexdigest())
