"""Outgoing gRPC channels with their TLS and API key. All channels are opened here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import grpc

from outrider.base.grpc_options import MAX_MESSAGE_BYTES, channel_options
from outrider.protocol.errors import InvalidRequest
from outrider.security.api_keys import HEADER, bearer
from outrider.security.credentials import Credentials
from outrider.security.tls import Tls


@dataclass(frozen=True, slots=True)
class Channels:
    """Factory of channels: in plain text without `tls`, without credentials if `key` is empty."""

    tls: Tls | None = None
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, credentials: Credentials) -> Self:
        """Return the channels from a service to others, with its present credentials."""
        return cls(credentials.tls, credentials.own_keys.first)

    def channel(self, address: str) -> grpc.Channel:
        """Return a channel for synchronous stubs."""
        return cast("grpc.Channel", self._open(grpc, address))

    def aio_channel(self, address: str, receive_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
        """Return a channel for asynchronous stubs of the running event loop; `receive_bytes` limits a message."""
        return cast("grpc.aio.Channel", self._open(grpc.aio, address, receive_bytes))

    def _open(self, kind: Any, address: str, receive_bytes: int = MAX_MESSAGE_BYTES) -> Any:
        options = channel_options(receive_bytes)
        if self.tls is None:
            channel = kind.insecure_channel(address, options=options)
        else:
            options += self.tls.channel_options()
            channel = kind.secure_channel(address, self.tls.channel_credentials(), options=options)
        return _ChannelWithKey(channel, key) if (key := (self.key or "").strip()) else channel


PLAIN = Channels()


class _ChannelWithKey:
    """Channel that adds the API key to every call; gRPC's credentials need TLS, its interceptors wrap each message."""

    def __init__(self, channel: Any, key: str) -> None:
        self._channel = channel
        if not (key.isascii() and key.isprintable()):  # gRPC would wait for ever, or quote it in an error
            raise InvalidRequest("an API key has other characters than visible ASCII", field="api_key")
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            setattr(self, kind, _with_key(getattr(channel, kind), (HEADER, bearer(key))))

    def close(self, *grace: Any) -> Any:
        return self._channel.close(*grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._channel.__exit__(*error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)


def _with_key(make: Callable[..., Any], header: tuple[str, str]) -> Callable[..., Any]:
    return lambda *given, **options: partial(_start, make(*given, **options), header)


def _start(call: Any, key: tuple[str, str], *sent: Any, metadata: Iterable[tuple[str, str]] = (), **more: Any) -> Any:
    return call(*sent, metadata=(key, *metadata), **more)
