"""Server loop of every service, also from `__main__`: listen, report health, convert errors, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.base.aio import FAILED, Continuation, background, until
from outrider.base.config import Settings, has_secrets
from outrider.base.endpoint import bracketed, is_loopback
from outrider.base.grpc_options import raise_descriptor_limit, server_options
from outrider.base.processes import collect_rarely
from outrider.protocol.errors import StartupError
from outrider.security.credentials import Credentials
from outrider.security.error_interceptor import ErrorInterceptor

log = structlog.get_logger(__name__)

HEALTH_S = 0.1
HANDLERS_END_S = 2.0


class Service(Protocol):
    """Interface of the three services."""

    @property
    def credentials(self) -> Credentials: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def auth_interceptor(self) -> grpc.aio.ServerInterceptor:
        """Return the interceptor that checks API keys."""

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Return further interceptors, closest to the handlers."""

    def add_to(self, server: grpc.aio.Server) -> None: ...

    async def start(self, port: int) -> None:
        """Start the service: the port is bound, and nothing is served yet."""

    def drain(self) -> None:
        """Accept no new work, and report that."""

    def busy(self) -> bool:
        """Return whether streams are open."""

    def ready(self) -> bool:
        """Return whether its own names are reported as SERVING; the process is from the moment it listens."""

    async def stop(self) -> None: ...


async def serve(service: Service, settings: Settings, ready: Callable[[str], None] = lambda _: None) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP, then drain and stop."""
    raise_descriptor_limit()
    calls = RunningCalls()
    server = grpc.aio.server(options=server_options(settings), interceptors=[calls, *interceptors(service, settings)])
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection([*service.names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    service.add_to(server)
    port = bind(server, settings.host, settings.port, service.credentials)
    if service.credentials.tls is None and has_secrets(settings) and not is_loopback(settings.host):
        log.warning("keys without TLS: they cross the network in plain text", host=settings.host)
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    closed = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]  # its terminal was
    for number in (signal.SIGTERM, signal.SIGINT, *closed):
        loop.add_signal_handler(number, leave.set)
    await server.start()
    try:
        await service.start(port)
    except BaseException:
        await server.stop(None)  # otherwise gRPC writes its own error
        raise
    await _set_health(status, [""], serving=True)
    address = f"{bracketed(settings.host)}:{port}"
    log.info("serving", address=address)
    collect_rarely()
    ready(address)
    async with background(_follow_health(status, service), service.credentials.follow()):
        await leave.wait()
    log.info("draining", seconds=settings.drain_s)
    await _set_health(status, ["", *service.names], serving=False)
    service.drain()
    await until(lambda: not service.busy(), settings.drain_s)
    await service.stop()
    await server.stop(grace=1.0)
    await calls.ended(HANDLERS_END_S)
    log.info("stopped")
    if FAILED:
        raise StartupError(f"stopped, because its {FAILED.pop()} failed; the log tells why")


class RunningCalls(grpc.aio.ServerInterceptor):
    """Record of the handlers in progress. Stopping a server cancels them; `ended` waits until they have ended.

    gRPC logs a traceback for each handler that an event loop cancels when it closes.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        call = asyncio.current_task()
        assert call is not None
        self._running.add(call)  # gRPC runs the handler in the interceptors' task
        call.add_done_callback(self._running.discard)
        return await continuation(handler_call_details)

    async def ended(self, seconds: float) -> bool:
        """Wait for the calls; return whether all ended in time."""
        return await until(lambda: not self._running, seconds)


def interceptors(service: Service, settings: Settings) -> list[grpc.aio.ServerInterceptor]:
    """Return the interceptors of every call."""
    return [service.auth_interceptor, ErrorInterceptor(settings.write_timeout_s), *service.interceptors]


def bind(server: grpc.aio.Server, host: str, port: int, credentials: Credentials) -> int:
    address = f"{bracketed(host)}:{port}"
    try:
        # Bind a plain socket first: for a port in use gRPC prints its own report to standard error.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        encrypted = credentials.server_credentials()
        if encrypted is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, encrypted)
    except (RuntimeError, OSError) as error:
        message = f"cannot listen on {address}: in use, or not an address of this machine; choose another --port"
        raise StartupError(message, field="port", value=port, limit="a free port") from error


async def _set_health(status: health.aio.HealthServicer, names: Iterable[str], *, serving: bool) -> None:
    state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in names:
        await status.set(name, state)


async def _follow_health(status: health.aio.HealthServicer, service: Service) -> None:
    shown: bool | None = None
    while True:
        if (serving := service.ready()) != shown:
            await _set_health(status, service.names, serving=serving)
            shown = serving
        await asyncio.sleep(HEALTH_S)
