"""What is downloaded is held against its digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from outrider.models.hub import check_digest
from outrider.protocol.errors import StartupError


def test_another_file_than_the_released_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    check_digest(path, hashlib.sha256(b"weights").hexdigest())
    path.write_bytes(b"other weights")
    with pytest.raises(StartupError, match="is not the file"):
        check_digest(path, hashlib.sha256(b"weights").hexdigest())
