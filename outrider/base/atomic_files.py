"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from outrider.protocol.errors import StartupError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the file given; it takes the place of `path` when the block ends well. A full disk is told as such."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    except Exception as error:
        if _is_full(error):
            raise StartupError(
                f"no room for {path}: {error}; make some and start the same command again, it goes on from there",
                field="path",
                value=str(path),
            ) from error
        raise
    finally:
        beside.unlink(missing_ok=True)


def _is_full(error: Exception) -> bool:
    """safetensors tells it in words."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return (isinstance(error, OSError) and error.errno in codes) or "No space left" in str(error)
