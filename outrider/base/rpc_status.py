"""Conversion of failed calls to errors."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.protocol.convert import ERROR_KEY, error_from_proto
from outrider.protocol.errors import OutriderError, Overloaded, PeerLost, Unauthenticated, Unavailable
from outrider.v1 import common_pb2 as common


def error_from_rpc(error: grpc.RpcError) -> OutriderError:
    """Return the error that the peer sent, or one for the call's status."""
    trailing: Any = error.trailing_metadata() or ()  # synchronous and asynchronous errors have different types for it
    for name, value in trailing:
        if str(name) == ERROR_KEY and isinstance(value, bytes):
            try:
                return error_from_proto(common.Error.FromString(value))
            except DecodeError:
                break  # use the status
    code: grpc.StatusCode = error.code()
    message = f"{code.name.lower()}: {error.details() or 'no details'}"
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(message)  # from a proxy that requires keys too
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"the peer is not an Outrider service: {message}")
    return PeerLost(message)
