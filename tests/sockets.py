"""Listening ports of a process, read from the kernel."""

from __future__ import annotations

import os
from pathlib import Path

_LISTEN = "0A"


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports, IPv4 and IPv6, on which the process listens."""
    process = Path("/proc") / str(pid)
    inodes = {os.readlink(link) for link in (process / "fd").iterdir()}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = fields = line.split()
            if state == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                ports.append(int(local.rpartition(":")[2], 16))
    return ports
