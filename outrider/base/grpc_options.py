"""gRPC channel and server options of all services."""

from __future__ import annotations

import resource
from typing import Any

from outrider.base.config import Settings

KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
IDLE_MS = 120_000  # without a call; clients reconnect by themselves
_OWN_DESCRIPTORS = 64  # for files, Redis and the like
_MIB = 1024 * 1024
MAX_MESSAGE_BYTES = 32 * _MIB  # of a client

_BOTH_ENDS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # its default of a minute is the one that counts
    ("grpc.keepalive_permit_without_calls", 1),
    # Only bit 0, no compression. gRPC checks a message's size after inflating it: a megabyte could become a gigabyte.
    # Other algorithms are refused when the headers arrive.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]


def server_options(settings: Settings) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", settings.max_message_mib * _MIB),
        ("grpc.max_send_message_length", settings.max_message_mib * _MIB),
        ("grpc.max_concurrent_streams", settings.max_streams),
        # Peers ping at our interval: the default of five minutes ends idle streams with "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", max_connections(settings)),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.server_handshake_timeout_ms", round(1000 * settings.open_timeout_s)),
        *_BOTH_ENDS,
    ]


def max_connections(settings: Settings) -> int:
    """Return the limit of each port: a third of the descriptors each for gRPC, HTTP and outgoing connections."""
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)  # `serve` raises the soft limit to this
    if descriptors == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(1, min(settings.max_connections, (descriptors - _OWN_DESCRIPTORS) // 3))


def raise_descriptor_limit() -> None:
    """Raise the descriptor limit to the maximum of this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def channel_options(receive_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Return the options of a channel. `receive_bytes` limits replies of peers that send small messages only."""
    return [
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.max_pings_without_data", 0),
        # Reconnect to a restarted peer within a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Do not use the HTTP proxy of the environment.
        ("grpc.enable_http_proxy", 0),
        # Give each channel its own connection, so that failures stay separate.
        ("grpc.use_local_subchannel_pool", 1),
        *_BOTH_ENDS,
    ]
