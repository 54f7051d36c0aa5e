"""A worker's metrics over HTTP, for Prometheus to scrape. The coordinator's own edge serves its metrics."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import start_http_server

from outrider.config import WorkerSettings
from outrider.errors import StartupError
from outrider.metrics import Metrics

log = structlog.get_logger(__name__)


class MetricsServer:
    """/metrics at --metrics-port, from `open` to `close`; without that port nothing."""

    def __init__(self, metrics: Metrics, settings: WorkerSettings) -> None:
        self._metrics = metrics
        self._host, self._port = settings.host, settings.metrics_port
        self._serving: tuple[WSGIServer, threading.Thread] | None = None

    def open(self) -> None:
        if not self._port:
            return
        try:
            self._serving = start_http_server(self._port, self._host, self._metrics.registry)
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on {self._host}:{self._port}: {error.strerror}; choose another --metrics-port",
                field="metrics_port",
                value=self._port,
                limit="a free port",
            ) from error
        log.info("serving metrics", address=f"{self._host}:{self._port}")

    def close(self) -> None:
        if self._serving is None:
            return
        server, thread = self._serving
        self._serving = None
        server.shutdown()
        server.server_close()
        thread.join()
