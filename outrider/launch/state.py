"""State folder that `outrider up` keeps between runs: Redis's data, and the keys of its fleet.

One process at a time locks it. Child processes that inherit the lock's descriptor keep it locked until they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.base.atomic_files import atomic_write, scratch_folder
from outrider.base.config import home
from outrider.protocol.errors import StartupError

LEAVING_S = 6.0  # children of a killed run may still be ending
_POLL_S = 0.1
_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class StateFolder:
    folder: Path
    kept: bool  # for the next run
    lock: int  # the descriptor

    @property
    def data(self) -> Path:
        """Return the folder of Redis's data."""
        return self.folder / "redis"

    def key(self, name: str) -> Path:
        """Return the file of a secret, generated at the first call."""
        file = self.folder / name
        if not file.exists() or not file.stat().st_size:  # or a first run of an earlier version was interrupted
            with atomic_write(file) as new:
                new.write_text(secrets.token_urlsafe(32) + "\n")
        file.chmod(0o600)
        return file


@contextlib.contextmanager
def state_folder(named: str, port: int) -> Iterator[StateFolder]:
    """Lock and yield the named folder, or the one of this port.

    A random port, or one whose folder another run has locked, gets a temporary
    folder that ends with this run. A named folder that is locked is an error.
    """
    with contextlib.ExitStack() as exits:
        folder = Path(os.path.expanduser(named)) if named else home() / "up" / str(port)
        lock = _try_lock(_private(folder)) if named or port else None
        if named and lock is None:
            message = f"state_dir {folder} is in use by another `outrider up`"
            raise StartupError(message, field="state_dir", value=named, limit="a folder of its own")
        kept = lock is not None
        if lock is None:
            folder, lock = exits.enter_context(scratch_folder("outrider-state-"))
        else:
            exits.callback(os.close, lock)
        state = StateFolder(folder, kept, lock)
        _private(state.data)
        yield state


def _try_lock(folder: Path) -> int | None:
    """Return the lock's descriptor; None: another process holds it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(1 + round(LEAVING_S / _POLL_S)):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        time.sleep(_POLL_S)
    os.close(lock)
    return None


def _private(folder: Path) -> Path:
    """Make a folder that only this user can enter: it holds prompts and keys."""
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise StartupError(f"state_dir {folder} belongs to another user", field="state_dir", value=folder)
        folder.chmod(_PRIVATE)
    except OSError as error:
        message = f"state_dir: cannot use {folder}: {error.strerror}; give --state-dir, or set OUTRIDER_HOME"
        raise StartupError(message, field="state_dir", value=folder, limit="a folder") from error
    return folder
