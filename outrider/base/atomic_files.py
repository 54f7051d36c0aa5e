"""Atomic replacement of files."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from outrider.protocol.errors import StartupError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` if the block succeeds. Raise StartupError for a full disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # containers have processes of equal ids
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # else a crash of the machine may leave the new name with nothing in it
        temporary.replace(path)
    except Exception as error:
        codes, said = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), str(error)  # safetensors and torch only say it
        if (isinstance(error, OSError) and error.errno in codes) or "No space left" in said or "unexpected pos" in said:
            message = f"no room for {path}: {error}; free some space and repeat the command, which continues from there"
            raise StartupError(message, field="path", value=str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
