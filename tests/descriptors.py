"""Files and listening ports that a process has open, read from the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"


def open_files(pid: int) -> Iterator[str]:
    """Return what the process has open; it may close some of them meanwhile."""
    for link in (Path("/proc") / str(pid) / "fd").iterdir():
        try:
            yield os.readlink(link)
        except FileNotFoundError:
            continue


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports, IPv4 and IPv6, on which the process listens."""
    inodes = set(open_files(pid))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc") / str(pid) / "net" / table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                ports.append(int(local.rpartition(":")[2], 16))
    return ports
