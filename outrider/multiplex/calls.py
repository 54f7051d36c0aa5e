"""Session calls as a coordinator makes them: within a shared stream, or each a gRPC stream of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from outrider.base.aio import cancel_all
from outrider.multiplex.stream import MAX_UNSENT, STATUS_CODES, MultiplexedStream
from outrider.protocol.convert import ERROR_KEY

MAX_UNSENT_BYTES = 16 * 1024 * 1024  # without the first message


class MultiplexedCall(MultiplexedStream):
    """Call within a shared stream: messages of one session, serialised, to and from a worker."""

    def _check_end(self) -> None:
        """Raise the error of a failed call."""
        if (end := self.end_received) is None:
            raise rpc_error(grpc.StatusCode.CANCELLED, "cancelled here")
        if end.status != grpc.StatusCode.OK.value[0]:
            raise rpc_error(STATUS_CODES[end.status], end.details, end.error)

    def cancel(self) -> None:
        self.end(grpc.StatusCode.CANCELLED)

    async def close(self) -> None:
        self.cancel()


class OwnCall:
    """Call of its own, at a worker without a shared stream. Messages wait in a queue while the peer is slow."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._unsent_bytes = self._max_bytes = 0
        self._writing = asyncio.create_task(self._write())

    def send(self, message: bytes) -> bool:
        self._unsent_bytes += len(message)
        self._max_bytes = self._max_bytes or self._unsent_bytes + MAX_UNSENT_BYTES
        self._outbox.put_nowait(message)
        return self._outbox.qsize() <= MAX_UNSENT and self._unsent_bytes <= self._max_bytes

    async def read(self) -> bytes | None:
        message = await self._call.read()
        if message is grpc.aio.EOF:  # in order: gRPC raises the error of a failed call
            return None
        assert isinstance(message, bytes)
        return message

    def cancel(self) -> None:
        self._call.cancel()

    async def close(self) -> None:
        self.cancel()
        await cancel_all([self._writing])

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader raises the error
            self._unsent_bytes -= len(message)


SessionCall = MultiplexedCall | OwnCall


def rpc_error(code: grpc.StatusCode, details: str, error: bytes = b"") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata((ERROR_KEY, error)) if error else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)
