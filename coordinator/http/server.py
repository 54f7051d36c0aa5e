"""uvicorn inside the coordinator's event loop: its signals and its end are the coordinator's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from outrider.errors import StartupError
from outrider.serving import until

_GRACE_S = 2
_START_S = 10.0
_KEEP_ALIVE_S = 30
_BACKLOG = 1024


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._socket = _listen(host, port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="http")
        if not await until(lambda: self._server.started or self._ended(), _START_S) or self._ended():
            raise StartupError(f"HTTP on {self.address} did not start in {_START_S:g} s")

    def _ended(self) -> bool:
        return self._serving is None or self._serving.done()

    async def stop(self) -> None:
        """Answers that are still under way have a moment to end."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen for HTTP on {host}:{port}: {error.strerror}; choose another --http-port, or -1 for none",
            field="http_port",
            value=port,
            limit="a free port",
        ) from error
    listener.setblocking(False)
    return listener
