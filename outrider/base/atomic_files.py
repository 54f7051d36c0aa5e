"""Files that settings name, and files and folders that a killed process leaves neither half written nor behind."""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from outrider.protocol.errors import StartupError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SAYS_FULL = re.compile(r"\(os error (28|122|27)\)|No space left|unexpected pos")  # errors of safetensors and torch


def read_named(field: str, path: str) -> bytes:
    """Return the content of the file that a setting names, without a mark of UTF-8; raise StartupError without it."""
    try:
        named = Path(path).expanduser()
        if named.is_fifo() and field != "api_key":  # of a client, read once; else it would be waited for
            raise OSError(errno.EINVAL, "a pipe can be read only once, and services read such files again")
        return named.read_bytes().removeprefix(codecs.BOM_UTF8)
    except (OSError, RuntimeError) as error:  # of ~ without a home
        message = f"{field}: cannot read {path}: {getattr(error, 'strerror', error)}"
        raise StartupError(message, field=field, value=path) from error


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` if the block succeeds. Raise StartupError for a full disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # containers have processes of equal ids
    try:
        with room_for(path):
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())  # else a crash of the machine may leave the new name with nothing in it
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Raise StartupError if the block fails for a full disk."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", 0) in _FULL or _SAYS_FULL.search(str(error))
        if full and not isinstance(error, StartupError):  # of a block within
            message = f"no room for {path}: {error}; free some space and repeat the command, which continues from there"
            raise StartupError(message, field="path", value=str(path)) from error
        raise


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[tuple[Path, int]]:
    """Yield a new temporary folder and the descriptor of its lock; remove those of processes that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/lock"):
        with contextlib.suppress(OSError), left.open("r+") as lock:  # in use, of another user, or gone
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(lock.fileno()).st_mtime > 60.0:  # a newer one may not be locked yet
                shutil.rmtree(left.parent)
    with tempfile.TemporaryDirectory(prefix=prefix) as name, Path(name, "lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks, where none removes folders either
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name), lock.fileno()
