"""gRPC channel and server options, the same in all services."""

from __future__ import annotations

import resource
from typing import Any

from outrider.base.config import Settings

KEEPALIVE_MS = 30_000

KEEPALIVE_TIMEOUT_MS = 10_000

IDLE_MS = 120_000  # without a call; a client that comes again connects again

_OWN_DESCRIPTORS = 64  # for files, Redis and the like

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
