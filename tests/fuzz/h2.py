"""Handwritten HTTP/2 frames that no gRPC library sends."""

from __future__ import annotations

import random
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Return a literal header without index and Huffman coding."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),)) + text
    rest, out = len(text) - 127, bytearray(b"\x7f")
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes(out) + bytes((rest,)) + text


def message(data: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """Return the payload with gRPC's message prefix."""
    return bytes((compressed,)) + struct.pack(">I", len(data) if length is None else length) + data


def _headers(path: str, **changed: bytes | None) -> bytes:
    fields: dict[str, bytes | None] = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": path.encode(),
        ":authority": b"127.0.0.1",
        "te": b"trailers",
        "content-type": b"application/grpc",
    }
    fields |= {name.replace("_", "-"): value for name, value in changed.items()}
    return b"".join(header(name.encode(), value) for name, value in fields.items() if value is not None)


def connections(rng: random.Random, path: str, data: bytes) -> tuple[str, tuple[bytes, ...], bool]:
    """Return a description, the pieces, and whether an answer (or a reset) is required."""
    name = rng.choice(tuple(_MANNERS))
    return name, _MANNERS[name](rng, path, data), name not in _UNFINISHED


def _start() -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0)


def _call(head: bytes, body: bytes) -> tuple[bytes, ...]:
    return (_start(), frame(HEADERS, END_HEADERS, 1, head), frame(DATA, END_STREAM, 1, body[:16_000]))


def _noise(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    return (rng.randbytes(rng.choice((1, 9, 24, 500))),)


def _http1(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    return (b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",)


def _noise_after_preface(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    return (_start(), rng.randbytes(rng.choice((9, 40, 900))))


def _frames(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    """Return frames of any kind, in any order, on any stream."""
    made = [
        frame(
            rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 2, 3, 2**31 - 1)), rng.randbytes(rng.randrange(40))
        )
        for _ in range(rng.randrange(1, 9))
    ]
    return (_start(), *made)


def _wrong_length(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    length = rng.choice((0, len(data) + 1, 2**31, 2**32 - 1, 33 * 2**20))
    return _call(_headers(path), message(data, length=length))


def _compressed(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    encoding = rng.choice((b"gzip", b"deflate", b"identity", b"br", b"", None))
    return _call(_headers(path, grpc_encoding=encoding), message(data, compressed=rng.choice((1, 2, 255))))


def _metadata(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    # Only UTF-8 paths: on others grpcio itself fails, before any service code runs.
    odd = {
        "grpc_timeout": rng.choice((b"0n", b"-1S", b"99999999999H", b"x", b"1")),
        "authorization": rng.choice((b"Bearer x", b"\xff\xfe", b"Bearer " + b"k" * 5000)),
        "x_request_id": rng.choice((b"\x00", b"r" * 7000, b"a b", b"\xe4")),
        "traceparent": rng.choice((b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"ff", b"-" * 300)),
        "x_bin": b"x",
        "a_bin": rng.choice((b"!!!", b"AAAA", b"A")),
        "content_type": rng.choice((b"text/html", b"application/grpc+json", b"application/grpc;x", b"")),
        "te": rng.choice((b"", b"gzip", None)),
        ":method": rng.choice((b"GET", b"PUT", b"")),
        ":path": rng.choice((b"", b"*", b"//", path.encode() + b"/")),
        ":scheme": rng.choice((b"gopher", b"")),
        ":authority": rng.choice((b"", b"evil.example", b"\x00")),
    }
    name = rng.choice(tuple(odd))
    return _call(_headers(path, **{name: odd[name]}), message(data))


def _several_messages(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    """Return a call with several messages, or none, where one is expected."""
    return _call(_headers(path), b"".join(message(data) for _ in range(rng.choice((0, 2, 5)))))


def _reset(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    """Return streams that are opened and reset repeatedly."""
    opened = [
        frame(HEADERS, END_HEADERS, 2 * i + 1, _headers(path))
        + frame(DATA, 0, 2 * i + 1, message(data)[:16_000])
        + frame(RST, 0, 2 * i + 1, struct.pack(">I", rng.choice((0, 8, 2**32 - 1))))
        for i in range(rng.choice((1, 5, 20)))
    ]
    return (_start(), *opened)


def _half(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    whole = b"".join(_call(_headers(path), message(data)))
    return (whole[: rng.randrange(len(whole))],)


def _settings(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    """Return settings that leave no window for an answer, then a call."""
    chosen = struct.pack(">HI", rng.choice((1, 3, 4, 5, 6)), rng.choice((0, 1, 2**14, 2**31 - 1, 2**31, 2**32 - 1)))
    return (PREFACE + frame(SETTINGS, 0, 0, chosen), *_call(_headers(path), message(data))[1:])


def _continued(rng: random.Random, path: str, data: bytes) -> tuple[bytes, ...]:
    """Return a header block of many CONTINUATION frames without an end."""
    pieces = [frame(CONTINUATION, 0, 1, header(b"x-%d" % i, b"y" * 900)) for i in range(rng.choice((3, 40)))]
    return (_start(), frame(HEADERS, 0, 1, _headers(path)), *pieces)


_MANNERS = {
    "noise": _noise,
    "HTTP/1": _http1,
    "noise after the preface": _noise_after_preface,
    "frames": _frames,
    "wrong length": _wrong_length,
    "compressed": _compressed,
    "metadata": _metadata,
    "several messages": _several_messages,
    "reset": _reset,
    "half": _half,
    "settings": _settings,
    "headers that go on": _continued,
}
_UNFINISHED = {
    "noise",
    "noise after the preface",
    "frames",
    "half",
    "settings",
    "headers that go on",
    "reset",
    "wrong length",
}
