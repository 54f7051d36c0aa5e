"""The folder that `outrider up` keeps between runs: Redis's data, and the keys of its fleet.

One process at a time holds it, and whoever it starts with the lock's
descriptor holds it too, for as long as they live.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.base.config import home
from outrider.protocol.errors import StartupError

LEAVING_S = 6.0  # what was killed may have children that are still ending
_POLL_S = 0.1
_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class StateFolder:
    folder: Path
    kept: bool  # for the next run
    lock: int  # the descriptor

    @property
    def data(self) -> Path:
        """Redis's."""
        return self.folder / "redis"

    def key(self, name: str) -> Path:
        """A file with a secret in it, made up when it is first asked for."""
        file = self.folder / name
        if not file.exists():
            given = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(given, "w") as writing:
                writing.write(secrets.token_urlsafe(32) + "\n")
        file.chmod(0o600)
        return file


@contextlib.contextmanager
def state_folder(named: str, port: int) -> Iterator[StateFolder]:
    """The folder that was named, or the one that belongs to this port.

    A random port has none, and one that another run holds is left to it: then
    what is kept ends with this run. A named one that is held is an error.
    """
    with contextlib.ExitStack() as exits:
        if named:
            folder = Path(named).expanduser()
            lock = _hold(_private(folder), LEAVING_S)
            if lock is None:
                raise StartupError(
                    f"state_dir {folder} is in use by another `outrider up`",
                    field="state_dir",
                    value=named,
                    limit="a folder of its own",
                )
        else:
            folder = home() / "up" / str(port)
            lock = _hold(_private(folder), LEAVING_S) if port else None
        kept = lock is not None
        if lock is None:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-state-")))
            lock = _hold(folder, 0)
        assert lock is not None
        exits.callback(os.close, lock)
        state = StateFolder(folder, kept, lock)
        _private(state.data)
        yield state


def _hold(folder: Path, seconds: float) -> int | None:
    """The lock's descriptor; None: somebody else holds it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                return None
            time.sleep(_POLL_S)
        else:
            return lock


def _private(folder: Path) -> Path:
    """Ours, and nobody else's to enter: it holds prompts and keys."""
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise StartupError(f"state_dir {folder} belongs to another user", field="state_dir", value=folder)
        folder.chmod(_PRIVATE)
    except OSError as error:
        raise StartupError(
            f"state_dir: cannot use {folder}: {error.strerror}", field="state_dir", value=folder, limit="a folder"
        ) from error
    return folder
