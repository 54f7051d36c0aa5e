"""Published drafters are told from models by their files alone, without torch."""

from __future__ import annotations

import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from outrider.models.drafter_choice import choose_drafter
from outrider.protocol.errors import StartupError
from outrider.testing.toy_models import make_model
from tests.published import CASES, eagle3


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_recognised_by_its_files(name: str, tmp_path: Path) -> None:
    folder = str(CASES[name](tmp_path))
    target = folder if "-mtp" in name else "default"
    assert choose_drafter(folder, target) == ("published", folder)


def test_a_model_is_a_model(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path, seed=1))
    assert choose_drafter(folder, folder) == ("model", folder)


def test_a_target_with_a_module_is_a_model_for_other_targets(tmp_path: Path) -> None:
    folder = str(CASES["mimo-mtp"](tmp_path))
    assert choose_drafter(folder, "default") == ("model", folder)


@pytest.mark.parametrize("damage", ["no config", "deep config", "no weights", "short header", "no zip", "another zip"])
def test_a_damaged_folder_is_left_to_the_loader_of_models(tmp_path: Path, damage: str) -> None:
    if damage != "no config":
        (tmp_path / "config.json").write_text(json.dumps({"architectures": None}))
    if damage == "deep config":
        (tmp_path / "config.json").write_text("[" * 100_000)
    if damage == "another zip":
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
            archive.writestr("fc.weight", b"")
    if damage in ("no config", "short header"):
        (tmp_path / "model.safetensors").write_bytes(b"123")
    if damage == "no zip":
        (tmp_path / "pytorch_model.bin").write_bytes(b"fc.weight")
    assert choose_drafter(str(tmp_path), "default") == ("model", str(tmp_path))


class _Hub(BaseHTTPRequestHandler):
    """The few endpoints of a hub that a download asks for; it holds one drafter."""

    folder: Path
    name = "somebody/EAGLE3-toy"
    commit = "1" * 40

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        path, about = self.path.partition("?")[0], {"X-Repo-Commit": self.commit}
        if path == f"/api/models/{self.name}/revision/main":
            return self._send(json.dumps({"id": self.name, "sha": self.commit, "siblings": []}).encode(), about)
        if path == f"/api/models/{self.name}/tree/{self.commit}":
            files = [
                {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": each.name}
                for each in self.files
            ]
            return self._send(json.dumps(files).encode(), about)
        for each in self.files:
            if path == f"/{self.name}/resolve/{self.commit}/{each.name}":
                return self._send(each.read_bytes(), about | {"ETag": f'"{each.name}"'})
        return self._send(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> bytes:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        return b"" if self.command == "HEAD" else body

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize("files", ["safetensors", "bin"])
def test_a_hub_id_is_downloaded_and_recognised(files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = eagle3(tmp_path / "hub", files=files)
    (published / "code.py").write_text("raise SystemExit")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": published}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    try:
        kind, folder = choose_drafter(_Hub.name, "default")
        held = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        with pytest.raises(StartupError, match="cannot download the drafter somebody/else"):
            choose_drafter("somebody/else", "default")
    finally:
        server.shutdown()
        server.server_close()
    assert kind == "published"
    assert held == {path.name: path.read_bytes() for path in published.iterdir() if path.suffix != ".py"}
    assert choose_drafter(_Hub.name, "default") == (kind, folder), "it is kept, and found without the hub"


@pytest.mark.parametrize("error", [OSError(), ValueError("no such id\nmore")])
def test_any_refusal_of_the_hub_is_told_on_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **options: object) -> str:
        assert options["ignore_patterns"] == ["*/*"], "folders within a checkpoint are not read"
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(StartupError, match=r"cannot download the drafter somebody/else: (no such id)?$"):
        choose_drafter("somebody/else", "default")


def test_it_joins_other_kinds() -> None:
    assert choose_drafter("suffix+published:folder", "default") == ("suffix+published", "folder")
