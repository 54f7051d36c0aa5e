"""Service of a worker: what drafters and verifiers share, such as registration, metrics, probes and draining."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from outrider.base.aio import Call, cancel_all, critical_task
from outrider.base.config import WorkerSettings
from outrider.base.endpoint import ANY_HOST, bracketed, split
from outrider.multiplex.direct_call import Context, DirectCall
from outrider.multiplex.server import Handler, MultiplexedHandler
from outrider.observability.metrics import Metrics
from outrider.observability.metrics_server import MetricsServer
from outrider.observability.tracing import Tracing
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest, OutriderError, StartupError
from outrider.protocol.fleet import WorkerInfo, WorkerLoad
from outrider.protocol.vocabulary import Vocabulary
from outrider.runtime.registration_client import RegistrationClient
from outrider.security.auth_interceptor import AuthInterceptor
from outrider.security.channels import Channels
from outrider.security.credentials import Credentials
from outrider.security.error_interceptor import as_outrider_error
from outrider.v1 import common_pb2 as common

M = TypeVar("M")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class WorkLoop(Protocol):
    """Loop that computes for all sessions of a worker."""

    @property
    def busy(self) -> bool: ...

    async def run(self) -> None: ...

    def wake(self) -> None: ...

    def wake_now(self) -> None: ...

    def close(self, session: Any, error: OutriderError | None = None) -> None: ...

    def load(self) -> WorkerLoad: ...

    def drain(self) -> None: ...

    def stop(self) -> None: ...


class WorkerService:
    """Base of both workers' services."""

    names: tuple[str, ...]
    work: str  # of its loop, for the log
    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()

    def __init__(
        self,
        settings: WorkerSettings,
        about: WorkerInfo,
        vocabulary: Vocabulary | None,
        loop: WorkLoop,
        metrics: Metrics,
        tracing: Tracing,
        handler: Handler,  # of the call for one session
        decode: Callable[[bytes], Any],  # for the requests of that call
    ) -> None:
        """Prepare the service; `about` has what the worker is, without id, address and state."""
        self.credentials = Credentials(settings)
        self.auth_interceptor = AuthInterceptor(dict.fromkeys(self.names, self.credentials.own_keys))
        self._multiplexed = MultiplexedHandler(handler, decode, self.credentials.own_keys, settings)
        self._multiplexed.wake = loop.wake_now
        self._metrics_server = MetricsServer(metrics, settings, self.credentials)
        self._host = settings.host
        self._about = replace(
            about,
            worker_id=f"{socket.gethostname()}-{secrets.token_hex(4)}",
            address=check_address("advertise", settings.advertise),
            machine=machine_id(),
            capacity=settings.max_sessions,
        )
        self._registration = RegistrationClient(
            addresses("coordinators", settings.coordinators),
            lambda: replace(self._about, load=self._worker_loop.load(), draining=self._draining),
            vocabulary,
            lambda: Channels.of(self.credentials),
        )
        self._worker_loop = loop
        self._tracing = tracing
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False

    async def start(self, port: int) -> None:
        if not self._about.address:
            host = socket.gethostname() if self._host in ANY_HOST else self._host
            self._about = replace(self._about, address=f"{bracketed(host)}:{port}")
        self._metrics_server.open()
        self._tasks = [
            critical_task(self._worker_loop.run(), self.work),
            critical_task(self._registration.run(), "registration"),
        ]

    def drain(self) -> None:
        self._draining = True
        self._worker_loop.drain()
        self._registration.changed.set()

    def busy(self) -> bool:
        return self._worker_loop.busy

    def ready(self) -> bool:
        return True  # the model is loaded and warm before this service is created

    async def stop(self) -> None:
        await cancel_all(self._tasks)
        self._worker_loop.stop()
        self._multiplexed.close()
        self._metrics_server.close()
        await self._tracing.close()

    @property
    def Sessions(self) -> Callable[..., AsyncIterator[Any]]:
        return self._multiplexed.serve

    async def _receive(
        self, session: object, requests: AsyncIterator[M], context: Context, apply: Callable[[M], None]
    ) -> None:
        """Apply a peer's messages until it ends its side or one fails, and close the session."""
        try:
            if isinstance(context, DirectCall):
                context.deliver(apply)
                self._worker_loop.wake()  # for what has come before
            async for request in requests:
                apply(request)
                self._worker_loop.wake()
        except Exception as error:
            ended = isinstance(error, grpc.aio.AioRpcError)  # by the stream, with what it refused
            self._worker_loop.close(session, None if ended else as_outrider_error(error))
        self._worker_loop.close(session)

    async def Probe(self, request: common.ProbeRequest, context: Call) -> common.ProbeReply:
        return common.ProbeReply(load=convert.load_to_proto(self._worker_loop.load()), draining=self._draining)


def machine_id() -> str:
    """Return an id of the machine's boot, equal in all its containers; empty if the system has none."""
    try:
        return hashlib.sha256(_BOOT.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def addresses(field: str, text: str) -> list[str]:
    """Return the addresses of a comma-separated setting. Raise StartupError for one that cannot be called."""
    return [check_address(field, part) for part in text.split(",") if part]


def check_address(field: str, text: str) -> str:
    try:
        if text:  # else it is not given
            split(text)
    except InvalidRequest as error:
        raise StartupError(f"{field} is {text!r}, must be {error.limit}", field=field, value=text) from error
    return text.strip()
