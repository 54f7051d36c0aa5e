"""HTTP server of a worker's metrics, for Prometheus. The coordinator's HTTP API serves its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import make_wsgi_app

from outrider.base.config import WorkerSettings
from outrider.observability.metrics import Metrics
from outrider.protocol.errors import StartupError
from outrider.security.api_keys import ApiKeys
from outrider.security.credentials import Credentials

log = structlog.get_logger(__name__)

MOST = 16  # concurrent requests; further ones are disconnected
REQUEST_S = 10.0  # for one request, however slowly it arrives

_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """Server of /metrics at --metrics-port, from `open` to `close`; without that port, none."""

    def __init__(self, metrics: Metrics, settings: WorkerSettings, credentials: Credentials) -> None:
        self._host, self._port = settings.host, settings.metrics_port
        self._app = _with_key_check(make_wsgi_app(metrics.registry), credentials.keys["metrics_key"])
        if settings.metrics_tls and credentials.tls is None:
            raise StartupError("metrics_tls needs tls_cert and tls_key", field="metrics_tls", limit="a certificate")
        self._tls = credentials if settings.metrics_tls else None
        self._serving: tuple[WSGIServer, threading.Thread] | None = None

    def open(self) -> None:
        if not self._port:
            return
        try:
            server = _MetricsHttpServer(self._host, self._port, self._app, self._tls)
        except OSError as error:
            problem = f"cannot serve metrics on {self._host}:{self._port}: {error.strerror}"
            message = f"{problem}; choose another --metrics-port"
            raise StartupError(message, field="metrics_port", value=self._port, limit="a free port") from error
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        self._serving = server, thread
        log.info("serving metrics", address=f"{self._host}:{self._port}", tls=self._tls is not None)

    def close(self) -> None:
        if self._serving is None:
            return
        server, thread = self._serving
        self._serving = None
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug("metrics", request=format % args)


class _MetricsHttpServer(ThreadingMixIn, WSGIServer):
    """Server with a thread for each of at most MOST requests; handshake and request take at most REQUEST_S."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, app: _App, tls: Credentials | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tls = tls
        self._slots = threading.BoundedSemaphore(MOST)
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind without HTTPServer's lookup of the own host name, which may take seconds."""
        socket_address = self.server_address
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(socket_address)
        self.server_name, self.server_port = str(socket_address[0]), self.socket.getsockname()[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            log.warning("metrics request rejected: too many at once", limit=MOST)
            super().shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        self._slots.release()  # also where no thread could be started for it
        super().shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(REQUEST_S)
        connection = request.dup()
        timer = threading.Timer(REQUEST_S, _disconnect, (connection,))
        timer.daemon = True
        timer.start()
        try:
            tls = None if self._tls is None else self._tls.tls
            if tls is None or tls.lenient_context is None:
                super().finish_request(request, client_address)
            else:
                with tls.lenient_context.wrap_socket(request, server_side=True) as encrypted:
                    super().finish_request(encrypted, client_address)
        finally:
            timer.cancel()
            connection.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics request failed", peer=str(client_address), exc_info=True)


def _disconnect(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)


def _with_key_check(app: _App, keys: ApiKeys) -> _App:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if keys.allows(environ.get("HTTP_AUTHORIZATION")):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"a valid key is needed here: --metrics-key\n"]

    return answer
