"""HTTP server: uvicorn in the coordinator's event loop, which also handles signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from coordinator.api.http.connections import KEEP_ALIVE_S, Connection, Connections
from outrider.base.aio import until
from outrider.base.grpc_options import max_connections
from outrider.protocol.errors import StartupError
from outrider.security.credentials import Credentials
from outrider.settings.coordinator import CoordinatorSettings

_GRACE_S = 2
_START_S = 10.0
_BACKLOG = 1024


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Server of an application on the HTTP port."""

    def __init__(self, app: ASGIApp, settings: CoordinatorSettings, credentials: Credentials) -> None:
        self._socket = _listen(settings.host, settings.http_port)
        self.address = f"{settings.host}:{self._socket.getsockname()[1]}"
        open_ = Connections(max_connections(settings))
        connection = partial(Connection, open_, settings.open_timeout_s, settings.write_timeout_s)
        config = uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=1,  # connections accepted per wake-up: without descriptors asyncio logs each of them
            timeout_graceful_shutdown=_GRACE_S,
        )
        config.load()
        config.ssl = _context(credentials)
        self._server = _UvicornServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="http")
        if not await until(lambda: self._server.started or self._ended(), _START_S) or self._ended():
            raise StartupError(f"HTTP on {self.address} did not start in {_START_S:g} s")
        self._socket.listen(_BACKLOG)  # asyncio has set the backlog to 1

    def _ended(self) -> bool:
        return self._serving is None or self._serving.done()

    async def stop(self) -> None:
        """Stop after a short time for answers in progress."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)


def _context(credentials: Credentials) -> ssl.SSLContext | None:
    """Return a TLS context with the certificates of gRPC; each handshake uses the present ones."""
    first = None if credentials.tls is None else credentials.tls.context
    if first is None:
        return None

    def current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        if credentials.tls is not None and credentials.tls.context is not None:
            connection.context = credentials.tls.context

    first.sni_callback = current
    return first


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"cannot listen for HTTP on {host}:{port}: {error.strerror}"
        message = f"{problem}; choose another --http-port, or -1 for none"
        raise StartupError(message, field="http_port", value=port, limit="a free port") from error
    listener.setblocking(False)
    return listener
