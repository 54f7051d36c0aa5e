"""HTTP server: uvicorn in the coordinator's event loop, which also handles signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from functools import partial
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from coordinator.api.http.connections import KEEP_ALIVE_S, Connection, Connections
from outrider.base.aio import cancel_all, critical_task, until
from outrider.base.endpoint import bracketed
from outrider.base.grpc_options import max_connections
from outrider.protocol.errors import StartupError
from outrider.security.credentials import Credentials
from outrider.settings.coordinator import CoordinatorSettings

log = structlog.get_logger(__name__)

_GRACE_S = 2
_PAUSE_S = 1.0
_START_S = 10.0
_BACKLOG = 1024


class HttpServer:
    """Server of an application on the HTTP port."""

    def __init__(self, app: ASGIApp, settings: CoordinatorSettings, credentials: Credentials) -> None:
        self._socket = _listen(settings.host, settings.http_port)
        self.address = f"{bracketed(settings.host)}:{self._socket.getsockname()[1]}"
        self._open = Connections(max_connections(settings))
        self._open_timeout_s = settings.open_timeout_s
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._ssl = _context(credentials)
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]  # its own handlers
        given: dict[str, Any] = {"config": config, "server_state": self._server.server_state, "app_state": {}}
        timeouts = settings.open_timeout_s, settings.write_timeout_s
        self._make_connection = partial(Connection, self._open, *timeouts, **given)
        self._serving: asyncio.Task[None] | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = serving = asyncio.create_task(self._server.serve([]), name="http")
        if not await until(lambda: self._server.started or serving.done(), _START_S) or serving.done():
            raise StartupError(f"HTTP on {self.address} did not start in {_START_S:g} s")
        self._accepting = critical_task(self._accept(), "HTTP connections")

    async def _accept(self) -> None:
        """Accept connections one by one: without descriptors each would be logged."""
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            except OSError as error:
                log.warning("HTTP connection not accepted", error=error.strerror)
                await asyncio.sleep(0 if isinstance(error, ConnectionError) else _PAUSE_S)  # that one, or all
                continue
            connection = self._make_connection()
            connection.opening = asyncio.create_task(self._begin(connection, peer))
            await asyncio.sleep(0)  # others wait, too

    async def _begin(self, connection: Connection, peer: socket.socket) -> None:
        """Begin a connection. It counts as idle during its TLS handshake, as while it sends no request."""
        timeout_s = None if self._ssl is None else self._open_timeout_s
        if self._ssl is not None and not self._open.enter(connection):
            peer.close()
            return
        self._open.idle(connection)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, peer, ssl=self._ssl, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            log.debug("HTTP connection failed", error=str(error))
        finally:
            if connection.opening is not None:
                self._open.leave(connection)

    async def stop(self) -> None:
        """Stop after a short time for answers in progress."""
        await cancel_all([self._accepting] if self._accepting is not None else [])
        self._socket.close()
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
        problem = f"cannot listen for HTTP on {bracketed(host)}:{port}: {error.strerror}"
        message = f"{problem}; choose another --http-port, or -1 for none"
        raise StartupError(message, field="http_port", value=port, limit="a free port") from error
    listener.setblocking(False)
    return listener
