"""Minimal HTTP/2 client that sends a gRPC server frames that no gRPC client sends."""

from __future__ import annotations

import select
import socket
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW = 4
_FRAME = 16_384
_WINDOW = 65_535


@lru_cache
def bomb(mebibytes: int, encoding: str = "gzip") -> bytes:
    """Return this many MiB of zeros, compressed a thousandfold with gRPC's "gzip" or "deflate"."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 15 if encoding == "deflate" else 31)
    piece = bytes(1024 * 1024)
    return b"".join(squeeze.compress(piece) for _ in range(mebibytes)) + squeeze.flush()


def message(payload: bytes, *, compressed: bool = False) -> bytes:
    """Return the payload with gRPC's message prefix."""
    return struct.pack(">BI", compressed, len(payload)) + payload


@dataclass(slots=True)
class Http2:
    """Plaintext connection. Streams have odd numbers."""

    address: str
    frames: list[tuple[int, int, int, bytes]] = field(default_factory=list)  # type, flags, stream, payload
    _socket: socket.socket = field(init=False)
    _heard: bytes = b""
    _window: int = _WINDOW
    _windows: dict[int, int] = field(default_factory=dict)
    _first_window: int = _WINDOW
    closed: bool = False

    def __enter__(self) -> Self:
        host, port = self.address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def call(self, stream: int, path: str, *more: tuple[str, str]) -> None:
        """Send the headers of a gRPC call."""
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        headers += [("te", "trailers"), ("content-type", "application/grpc"), *more]
        self._windows[stream] = self._first_window
        self._send(_frame(_HEADERS, _END_HEADERS, stream, _block(headers)))

    def data(self, stream: int, payload: bytes, *, end: bool = False, seconds: float = 10.0) -> bool:
        """Send the payload. Return whether all of it was sent before the stream's end or the timeout."""
        deadline = time.monotonic() + seconds
        sent = 0
        while sent < len(payload):
            room = min(_FRAME, len(payload) - sent, self._window, self._windows[stream])
            if room <= 0:
                self.listen(0.05)
                if self.closed or self.ended(stream) or time.monotonic() > deadline:
                    return False
                continue
            last = sent + room == len(payload)
            self._send(_frame(_DATA, _END_STREAM if end and last else 0, stream, payload[sent : sent + room]))
            sent += room
            self._window -= room
            self._windows[stream] -= room
            self.listen(0)
            if self.closed:
                return False
        return True

    def listen(self, seconds: float) -> None:
        """Read frames for this time, or those already received."""
        deadline = time.monotonic() + seconds
        while not self.closed:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return
            try:
                data = self._socket.recv(65_536)
            except ConnectionError:
                data = b""
            if not data:
                self.closed = True
                return
            self._heard += data
            self._parse()

    def until_ended(self, stream: int, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not (self.closed or self.ended(stream)):
            assert time.monotonic() < deadline, f"stream {stream} goes on: {self.frames}"
            self.listen(0.05)

    def ended(self, stream: int) -> bool:
        return any(
            number == stream and (kind == _RST_STREAM or (kind in (_HEADERS, _DATA) and flags & _END_STREAM))
            for kind, flags, number, _ in self.frames
        )

    def said(self) -> bytes:
        """Return all received payloads, with compressed headers."""
        return b"".join(payload for _, _, _, payload in self.frames)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except (ConnectionError, TimeoutError):
            self.closed = True

    def _parse(self) -> None:
        while len(self._heard) >= 9:
            length = int.from_bytes(self._heard[:3])
            if len(self._heard) < 9 + length:
                return
            kind, flags = self._heard[3], self._heard[4]
            stream = int.from_bytes(self._heard[5:9]) & 0x7FFF_FFFF
            payload, self._heard = self._heard[9 : 9 + length], self._heard[9 + length :]
            self.frames.append((kind, flags, stream, payload))
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for key, value in struct.iter_unpack(">HI", payload):
                if key == _INITIAL_WINDOW:
                    for number in self._windows:
                        self._windows[number] += value - self._first_window
                    self._first_window = value
            self._send(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._send(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload)
            if stream:
                self._windows[stream] = self._windows.get(stream, self._first_window) + more
            else:
                self._window += more
        elif kind == _GOAWAY:
            self.closed = True


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _block(headers: Iterable[tuple[str, str]]) -> bytes:
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    data = text.encode(errors="surrogateescape")
    length = len(data)
    if length < 127:
        return bytes([length]) + data
    head, length = bytearray([127]), length - 127
    while length >= 128:
        head.append(length % 128 + 128)
        length //= 128
    return bytes([*head, length]) + data
