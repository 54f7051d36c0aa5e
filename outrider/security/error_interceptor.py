"""gRPC interceptor that checks requests and turns exceptions into statuses."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc

from outrider.base.aio import Call, Continuation, WriteTimer
from outrider.protocol import convert
from outrider.protocol.errors import Expired, InvalidRequest, OutriderError, Unavailable
from outrider.protocol.field_limits import check_fields

log = structlog.get_logger(__name__)

UNREAD_STATUS_S = 1.0


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Conversion of exceptions to statuses, and of undecodable requests to INVALID_ARGUMENT."""

    def __init__(self, write_timeout_s: float) -> None:
        """Set the longest time for a peer to read a reply of a stream."""
        self._write_timeout_s = write_timeout_s

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        read, write = checked_reader(handler.request_deserializer), handler.response_serializer
        checked = partial(_checked_stream_handler, write_timeout_s=self._write_timeout_s)
        if inspect.isasyncgenfunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(checked(handler.stream_stream), read, write)
        if inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(checked(handler.unary_stream), _late(read), write)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_checked_unary_handler(handler.unary_unary), _late(read), write)
        return handler  # library services that write to their context themselves


def checked_reader(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that raises InvalidRequest for bytes that are no valid request."""

    def read(data: bytes) -> Any:
        try:
            request = decode(data)
        except DecodeError as error:
            message = f"the request is no valid message: {error}; text must be UTF-8"
            limit = "a protobuf message with UTF-8 text"
            raise InvalidRequest(message, field="request", value=str(error), limit=limit) from error
        check_fields(request)
        return request

    return read


def _late(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that returns the error: gRPC reads a single request before it calls the handler."""

    def read_late(data: bytes) -> Any:
        try:
            return read(data)
        except InvalidRequest as error:
            return error

    return read_late


def _valid(request: Any) -> Any:
    """Return a request, or the iterator of a stream; raise the error that stands for an invalid request."""
    if isinstance(request, InvalidRequest):
        raise request
    return request


def _checked_unary_handler(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def checked(request: Any, context: Call) -> Any:
        try:
            return await behaviour(_valid(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, as_outrider_error(error))

    return checked


def _checked_stream_handler(behaviour: Callable[..., AsyncIterator[Any]], write_timeout_s: float) -> Callable[..., Any]:
    async def checked(request: Any, context: Call) -> None:
        timer = WriteTimer(write_timeout_s)
        try:
            async with contextlib.aclosing(behaviour(_valid(request), context)) as replies, timer.timeout:  # type: ignore[type-var]
                async for reply in replies:
                    timer.began = timer.now()
                    try:
                        await context.write(reply)
                    except cygrpc.ExecuteBatchError:
                        log.debug("caller is gone", peer=context.peer())
                        return
                    finally:
                        timer.began = None
                        if timer.timeout.when() is not None:  # the handler ends before `abort`, and may log it
                            context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)
                return
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if not (isinstance(error, TimeoutError) and timer.timeout.expired()):
                await abort(context, as_outrider_error(error))
        finally:
            timer.handle.cancel()
        log.info("stream ended: peer does not read", peer=context.peer(), seconds=write_timeout_s)
        unread = f"the peer has not read its messages for {write_timeout_s:g} s"
        # Unread replies block the status too: gRPC keeps it, and the call ends here.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_STATUS_S):
                await abort(context, Expired(unread, field="write_timeout_s", limit=f"{write_timeout_s:g} s"))

    return checked


async def abort(context: Call, error: OutriderError) -> NoReturn:
    """End a call with a status and the error as trailing metadata, besides what the handler has set."""
    metadata = (*context.trailing_metadata(), (convert.ERROR_KEY, convert.error_to_proto(error).SerializeToString()))
    if error.retry_after_ms is not None:
        metadata += (("grpc-retry-pushback-ms", str(error.retry_after_ms)),)  # a client's retry policy waits for it
    details = error.message.encode("ascii", "replace").decode()  # gRPC triples other bytes, and headers are small
    error.with_traceback(None)  # of frames that keep the error, or a task that it has ended: a cycle
    try:
        await context.abort(grpc.StatusCode[error.grpc_status], details, trailing_metadata=metadata)
    except grpc.aio.AbortError as kept:  # gRPC keeps it in a cycle with the call, and its traceback keeps the request
        kept.__context__, forget = None, kept.with_traceback
        if (call := asyncio.current_task()) is not None:
            call.add_done_callback(lambda _: forget(None))
        raise


def as_outrider_error(error: BaseException) -> OutriderError:
    """Return an OutriderError as it is; log any other and return one with its reference in the log."""
    if isinstance(error, OutriderError):
        return error
    reference = secrets.token_hex(6)
    log.error("request failed", reference=reference, exc_info=error)
    if isinstance(error, RuntimeError) and error.args == ("can't start new thread",):
        return Unavailable("the system allows this process no further thread", retry_after_ms=1000)
    return OutriderError(f"internal error: {type(error).__name__}; see the log under {reference}")
