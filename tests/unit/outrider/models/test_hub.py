"""What is downloaded is held against its digest; what an older version has indexed is indexed again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from outrider.models import INDEX
from outrider.models.hub import check_digest, locate
from outrider.protocol.errors import StartupError
from tests.gguf_files import Shape, write_gguf


def test_another_file_than_the_released_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    check_digest(path, hashlib.sha256(b"weights").hexdigest())
    path.write_bytes(b"other weights")
    with pytest.raises(StartupError, match="is not the file"):
        check_digest(path, hashlib.sha256(b"weights").hexdigest())


@pytest.mark.parametrize("by", ["file", "folder"])
def test_a_folder_that_knows_of_no_scaling_is_indexed_again(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0", fields=scaling)
    folder = Path(locate(str(path), print))
    config, index = (json.loads((folder / name).read_text()) for name in ("config.json", INDEX))
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}})
    )
    assert index["scaling"]["factor"] == 8.0
    assert index.pop("version") > 1
    (folder / INDEX).write_text(json.dumps(index))
    said: list[str] = []
    for _ in range(2):
        assert locate(str(path if by == "file" else folder), said.append) == folder
    assert len(said) == 1, "once"
    assert "indexing" in said[0]
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == config["rope_parameters"]
