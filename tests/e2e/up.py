"""`outrider up` as a process of its own, and the processes that it starts."""

from __future__ import annotations

import glob
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import ROOT, START_S, environment, until
from tests.contract.test_security import OUTRIDER

_PLAIN = 'echo $$ > "$PID_FILE"; exec "$@"'
# A script that starts it with &: without job control the shell has it ignore SIGINT. The shell takes Ctrl-C as an
# interactive one does, and ends with the status of what it started.
_IN_BACKGROUND = 'trap : INT; "$@" & pid=$!; echo "$pid" > "$PID_FILE"; wait "$pid"; wait "$pid"'


@dataclass(frozen=True, slots=True)
class Up:
    process: subprocess.Popen[bytes]  # the leader of a process group
    log: Path
    pid: int

    def said(self, pattern: str, seconds: float = 2 * START_S) -> str:
        """Return what the pattern's group matched in the log, once it is there."""

        def found() -> str:
            match = re.search(pattern, self.log.read_text())
            if match is None:
                assert self.process.poll() is None, self.log.read_text()
            return match[1] if match else ""

        return str(until(found, seconds, pattern))

    def ready(self) -> str:
        """Return the coordinators' address once everything is there."""
        return self.said(r"ready\s+gRPC at (\S+)")

    def family(self) -> list[int]:
        """Return the ids of all its processes, its own first."""
        return _family(self.pid)

    def redis(self) -> int:
        """Return the id of its Redis; 0: there is none."""
        return next((pid for pid in self.family() if "valkey-server" in command_line(pid)), 0)


@contextmanager
def up(folder: Path, *flags: str, in_background: bool = False, **variables: str) -> Iterator[Up]:
    """Run it with ports of its own, `in_background` from a script with &; SIGTERM at the end."""
    log = folder / f"up-{len(list(folder.glob('up-*.log')))}.log"
    pid_file = log.with_suffix(".pid")
    line = [*OUTRIDER, "up", "--port", "0", "--http-port", "-1", "--device", "cpu", "--threads", "1", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", _IN_BACKGROUND if in_background else _PLAIN, "sh", *line],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(PID_FILE=str(pid_file), **variables),
            start_new_session=True,
        )
    pid = int(until(lambda: pid_file.exists() and pid_file.read_text(), 20, "process id"))
    try:
        yield Up(process, log, pid)
    finally:
        if process.poll() is None:
            os.kill(pid, signal.SIGTERM)
        process.wait(40)


def command_line(pid: int) -> str:
    return _read(Path("/proc") / str(pid) / "cmdline").replace("\0", " ").strip()


def _family(pid: int) -> list[int]:
    of_threads = glob.glob(f"/proc/{pid}/task/*/children")  # unlike Path's it takes folders that vanish
    children = [int(child) for one in of_threads for child in _read(Path(one)).split()]
    return [pid, *(one for child in children for one in _family(child))]


def _read(file: Path) -> str:
    """Return nothing for a process or a thread that has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""
