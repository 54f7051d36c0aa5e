"""`healthcheck.py ADDRESS SERVICE`: exits 0 when the service says that it can serve, else 1 with the reason.

Where the service speaks TLS, so does this: it reads the same OUTRIDER_TLS_CA, OUTRIDER_TLS_CERT and OUTRIDER_TLS_KEY.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.protocol.errors import StartupError
from outrider.security.tls import Tls

TIMEOUT_S = 3.0


def trouble(address: str, service: str) -> str | None:
    """What keeps the service from serving; None if nothing does."""
    try:
        tls = Tls.load(**{name: os.environ.get(f"OUTRIDER_TLS_{name.upper()}", "") for name in ("cert", "key", "ca")})
    except StartupError as error:
        return f"{service} at {address}: {error.message}"
    # A proxy set for the container is not meant for calls inside it.
    options = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        opened = grpc.insecure_channel(address, options)
    else:
        opened = grpc.secure_channel(address, tls.channel_credentials(), options)
    with opened as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            return f"{service} at {address}: {error.code().name}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{service} at {address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: healthcheck.py ADDRESS SERVICE")
    sys.exit(trouble(sys.argv[1], sys.argv[2]))
