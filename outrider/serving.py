"""What every service does alike: listen, report health, answer errors, drain on SIGTERM.

`serve` runs one service from its `__main__`; `channel_options` and
`server_options` are the gRPC settings of both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import resource
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider import wire
from outrider.config import Settings, WorkerSettings, has_secrets
from outrider.credentials import Credentials
from outrider.endpoint import is_loopback
from outrider.errors import Expired, InvalidRequest, OutriderError, StartupError, grpc_status
from outrider.limits import check_fields

T = TypeVar("T")
log = structlog.get_logger(__name__)

KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
IDLE_MS = 120_000  # without a call; a client that comes again connects again
HEALTH_S = 0.1
_OWN_DESCRIPTORS = 64  # for files, Redis and the like
CANCEL_AGAIN_S = 1.0
UNREAD_STATUS_S = 1.0
_MIB = 1024 * 1024
# Of the compression algorithms only "none", bit 0. gRPC inflates a message before it looks at its size, and a megabyte
# becomes a gigabyte. A peer that names another algorithm is refused by its headers.
_UNCOMPRESSED = ("grpc.compression_enabled_algorithms_bitset", 1)


def server_options(settings: Settings) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", settings.max_message_mib * _MIB),
        ("grpc.max_send_message_length", settings.max_message_mib * _MIB),
        ("grpc.max_concurrent_streams", settings.max_streams),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Allow peers to ping as often as we do: the default of five minutes ends idle streams with "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", max_connections(settings)),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.server_handshake_timeout_ms", round(1000 * settings.open_timeout_s)),
        _UNCOMPRESSED,
    ]


def max_connections(settings: Settings) -> int:
    """Of each port: a third of the descriptors for gRPC, a third for HTTP, a third for what we call ourselves."""
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)  # as many as `serve` will ask for
    if descriptors == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(1, min(settings.max_connections, (descriptors - _OWN_DESCRIPTORS) // 3))


def raise_descriptor_limit() -> None:
    """To what the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def channel_options(max_message_mib: int = 32, receive_bytes: int | None = None) -> list[tuple[str, Any]]:
    """`receive_bytes`: less than what is sent, where the other end has only little to say."""
    return [
        ("grpc.max_receive_message_length", receive_bytes or max_message_mib * _MIB),
        ("grpc.max_send_message_length", max_message_mib * _MIB),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted peer is found again within a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A proxy for the web is none for us.
        ("grpc.enable_http_proxy", 0),
        # Every channel its own connection: one peer's trouble stays its own.
        ("grpc.use_local_subchannel_pool", 1),
        _UNCOMPRESSED,
    ]


class Service(Protocol):
    """One of the three services, between `start` and `stop`."""

    @property
    def credentials(self) -> Credentials: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def guard(self) -> grpc.aio.ServerInterceptor:
        """Asks callers for keys."""
        ...

    def add_to(self, server: grpc.aio.Server) -> None: ...

    async def start(self, port: int) -> None:
        """Called when the port is bound and before anything is served."""
        ...

    def drain(self) -> None:
        """Take nothing new; say so to whoever asks."""
        ...

    def busy(self) -> bool:
        """Whether streams are still open."""
        ...

    def ready(self) -> bool:
        """Whether its own names may be reported as serving; the process as a whole is, once it listens."""
        ...

    async def stop(self) -> None: ...


async def serve(service: Service, settings: Settings, ready: Callable[[str], None] = lambda _: None) -> None:
    """Run until SIGTERM or SIGINT, then drain and leave."""
    raise_descriptor_limit()
    server = grpc.aio.server(options=server_options(settings), interceptors=interceptors(service, settings))
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection([*service.names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    service.add_to(server)
    port = bind(server, settings.host, settings.port, service.credentials)
    if service.credentials.tls is None and has_secrets(settings) and not is_loopback(settings.host):
        log.warning("keys are asked for without TLS: whoever is on the way can read them", host=settings.host)
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    await server.start()
    try:
        await service.start(port)
    except BaseException:
        await server.stop(None)  # left alone, gRPC would complain in words of its own
        raise
    await _set_health(status, [""], serving=True)
    address = f"{settings.host}:{port}"
    log.info("serving", address=address)
    ready(address)
    async with background(_follow_health(status, service), service.credentials.follow()):
        await leave.wait()
    log.info("draining", seconds=settings.drain_s)
    await _set_health(status, ["", *service.names], serving=False)
    service.drain()
    await until(lambda: not service.busy(), settings.drain_s)
    await service.stop()
    await server.stop(grace=1.0)
    log.info("stopped")


def interceptors(service: Service, settings: Settings) -> list[grpc.aio.ServerInterceptor]:
    """What every call goes through. How long clients of a coordinator may read is for its sessions to say."""
    write_timeout_s = settings.write_timeout_s if isinstance(settings, WorkerSettings) else None
    return [service.guard, ErrorInterceptor(write_timeout_s)]


def bind(server: grpc.aio.Server, host: str, port: int, credentials: Credentials) -> int:
    try:
        # Tried by hand first: gRPC reports a port in use on standard error, in words of its own.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        encrypted = credentials.server_credentials()
        if encrypted is None:
            return server.add_insecure_port(f"{host}:{port}")
        return server.add_secure_port(f"{host}:{port}", encrypted)
    except (RuntimeError, OSError) as error:
        raise StartupError(
            f"cannot listen on {host}:{port}: in use, or not an address of this machine; choose another --port",
            field="port",
            value=port,
            limit="a free port",
        ) from error


async def until(condition: Callable[[], bool], seconds: float, interval_s: float = 0.02) -> bool:
    """Wait for a condition that nobody signals; whether it came true in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(interval_s)
    return True


async def first_message(stream: AsyncIterator[T], timeout_s: float, what: str) -> T:
    """The message that must open a stream, in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream)
    except TimeoutError as error:
        raise Expired(
            f"the stream said nothing for {timeout_s:g} s; its first message must be {what}",
            field="first message",
            value="none",
            limit=f"{timeout_s:g} s",
        ) from error
    except StopAsyncIteration as error:
        raise InvalidRequest(f"the stream ended before its first message, {what}", field="first message") from error


def vital(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run a loop that the service cannot do without: should it ever end by an error, so does the process.

    Whoever watches it starts it again; to go on without would leave every stream hanging.
    """

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a vital loop has failed, leaving", loop=name, exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks until all of them have heard it."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def background(*tasks: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run tasks beside a block and end them with it.

    A library on the way may swallow a cancellation that comes together with a
    result (asyncio.wait_for in Python 3.11 does), so it is said again until
    it is heard.
    """
    running = [asyncio.create_task(task) for task in tasks]
    try:
        yield running
    finally:
        await cancel_all(running)


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


class _Undecodable:
    """Stands in for a request whose bytes are no message."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses, in one place, and bytes that are no message into INVALID_ARGUMENT."""

    def __init__(self, write_timeout_s: float | None = None) -> None:
        """`write_timeout_s`: how long the other end of a stream may leave a reply unread."""
        self._write_timeout_s = write_timeout_s

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        decode = _lenient(handler.request_deserializer)
        if inspect.isasyncgenfunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(
                _guard_stream(handler.stream_stream, self._write_timeout_s, streams_in=True),
                decode,
                handler.response_serializer,
            )
        if inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, self._write_timeout_s, streams_in=False),
                decode,
                handler.response_serializer,
            )
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary), decode, handler.response_serializer
            )
        return handler  # library services that write to their context by themselves


def _lenient(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def deserialize(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return deserialize


def _checked(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise InvalidRequest(
            f"the request is no valid message: {request.reason}; text must be UTF-8",
            field="request",
            value=request.reason,
            limit="a protobuf message with UTF-8 text",
        )
    check_fields(request)
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _guard_unary(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, expected(error))

    return guarded


def _guard_stream(
    behaviour: Callable[..., AsyncIterator[Any]], write_timeout_s: float | None, *, streams_in: bool
) -> Callable[..., Any]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            given = _checked_stream(request) if streams_in else _checked(request)
            async with contextlib.aclosing(behaviour(given, context)) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    await _write(context, reply, write_timeout_s)
        except grpc.aio.AbortError:
            raise
        except _Gone:
            log.debug("caller is gone", peer=context.peer())
        except _Unread as error:
            # What is unread stands in the way of the status too: it is left to gRPC, and the call ends here.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNREAD_STATUS_S):
                    await abort(context, error.meant)
        except Exception as error:
            await abort(context, expected(error))

    return guarded


class _Gone(Exception):
    """The caller hung up while it was written to: there is nobody to tell anything."""


class _Unread(Exception):
    def __init__(self, meant: OutriderError) -> None:
        self.meant = meant


async def _write(context: grpc.aio.ServicerContext[Any, Any], reply: Any, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(reply)
    except cygrpc.ExecuteBatchError as error:
        raise _Gone from error
    except TimeoutError as error:
        log.info("peer does not read", peer=context.peer(), seconds=timeout_s)
        raise _Unread(Expired(f"nothing was read for {timeout_s:g} s", field="write_timeout_s")) from error


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> None:
    """End a call with a status and the error itself as trailing metadata."""
    metadata = ((wire.ERROR_KEY, wire.error_to_proto(error).SerializeToString()),)
    details = error.message.encode("ascii", "replace").decode()  # gRPC triples other bytes, and headers are small
    await context.abort(grpc_status(error), details, trailing_metadata=metadata)


def expected(error: Exception) -> OutriderError:
    """Return the error itself, or for a fault of ours one that names where the log tells of it."""
    if isinstance(error, OutriderError):
        return error
    reference = secrets.token_hex(6)
    log.error("request failed", reference=reference, exc_info=error)
    return OutriderError(f"internal error: {type(error).__name__}; the log tells more under {reference}")
