"""uvicorn inside the coordinator's event loop: its signals and its end are the coordinator's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.settings import CoordinatorSettings
from outrider.errors import StartupError
from outrider.serving import until

_GRACE_S = 2
_START_S = 10.0
_KEEP_ALIVE_S = 75  # longer than proxies keep theirs: whoever closes first may cut off a request
_BACKLOG = 1024


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """One that does not say all of a request's head in time is closed: uvicorn would hold it for ever."""

    def __init__(self, patience_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._patience_s = patience_s
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(self._patience_s, self.timeout_keep_alive_handler)


class HttpServer:
    def __init__(self, app: ASGIApp, settings: CoordinatorSettings) -> None:
        self._socket = _listen(settings.host, settings.http_port)
        self.address = f"{settings.host}:{self._socket.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                app,
                http=partial(_Connection, settings.open_timeout_s),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
                **_tls(settings),
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


def _tls(settings: CoordinatorSettings) -> dict[str, Any]:
    """The same files and the same rule as for gRPC, which has checked them."""
    if not settings.tls_cert:
        return {}
    files = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
    if settings.tls_client_auth:
        files["ssl_ca_certs"] = settings.tls_ca
    named = {name: str(Path(file).expanduser()) for name, file in files.items()}
    return {**named, "ssl_cert_reqs": ssl.CERT_REQUIRED} if settings.tls_client_auth else named


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
