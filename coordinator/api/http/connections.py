"""Connections of the HTTP port: limits of their number and of their idle time."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

log = structlog.get_logger(__name__)

KEEP_ALIVE_S = 75  # longer than usual proxies: the side that closes first may interrupt a request
KNOWN = "outrider.known"  # in the scope of an authenticated request
MIN_BYTES_PER_S = 10_000  # of a body or an answer
_NO_LINGER = struct.pack("ii", 1, 0)  # the kernel drops unread data on close
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connections:
    """Open connections, at most `limit`: a new one replaces an idle one, unauthenticated and long idle ones first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[Connection] = set()
        self._idle_unknown: dict[Connection, None] = {}  # in their order
        self._idle_known: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> bool:
        if connection not in self._open and len(self._open) >= self._limit and not self._close_idle():
            log.warning("HTTP connection refused: all connections busy", limit=self._limit)
            return False
        self._open.add(connection)
        return True

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)
        self.busy(connection)

    def idle(self, connection: Connection) -> None:
        if connection in self._open:
            (self._idle_known if connection.known else self._idle_unknown).setdefault(connection)

    def busy(self, connection: Connection) -> None:
        self._idle_unknown.pop(connection, None)
        self._idle_known.pop(connection, None)

    def _close_idle(self) -> bool:
        waiting = (each for group in (self._idle_unknown, self._idle_known) for each in group if not each.sending)
        if (connection := next(waiting, None)) is None:
            return False
        self.leave(connection)
        if connection.opening is None:
            connection.transport.abort()
        else:
            connection.opening.cancel()
        return True


class Connection(H11Protocol):
    """HTTP connection with timeouts that uvicorn lacks: for the head of a request, and for unread responses."""

    def __init__(self, connections: Connections, open_timeout_s: float, write_timeout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self.known = False  # it had an authenticated request
        self.opening: asyncio.Task[None] | None = None  # until its TLS handshake has ended
        self._all = connections
        self._open_timeout_s = open_timeout_s
        self._write_timeout_s = write_timeout_s
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opening = None
        if not self._all.enter(self):
            transport.write(_FULL)
            transport.close()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _should_upgrade(self) -> bool:
        return False  # Java's client offers h2c with each request, and uvicorn would warn of WebSocket libraries

    def on_response_complete(self) -> None:
        self.known = self.known or KNOWN in self.scope
        self.timeout_keep_alive = KEEP_ALIVE_S if self.known else self._open_timeout_s  # type: ignore[assignment]
        super().on_response_complete()
        self._mark()
        self._limit_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_reading()

    def _limit_reading(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        size = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self._write_timeout_s, self._cut_off, self.cycle, size)

    def _cut_off(self, response: Any, before: int) -> None:
        """Close without waiting for unread data, if there is still too much, or any of a complete response."""
        left = self.transport.get_write_buffer_size()
        if not left or response is not self.cycle or not (self.flow.write_paused or not self._working):
            return
        if before - left >= self._write_timeout_s * MIN_BYTES_PER_S:
            self._limit_reading()
        else:
            log.info("client does not read", seconds=self._write_timeout_s)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.transport.abort()

    @property
    def sending(self) -> bool:
        """Return whether the client still has to read some of a complete response."""
        return self.opening is None and self.transport.get_write_buffer_size() > 0

    @property
    def _working(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        self._mark()
        if self._working:
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(self._open_timeout_s, self.timeout_keep_alive_handler)

    def _mark(self) -> None:
        if self._working:
            self._all.busy(self)
        else:
            self._all.idle(self)
