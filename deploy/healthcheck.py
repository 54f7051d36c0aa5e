"""`healthcheck.py ADDRESS SERVICE`: exit with 0 if the service reports SERVING, else with 1 and the reason.

TLS is configured by the same variables as the service: OUTRIDER_TLS_CA, OUTRIDER_TLS_CERT and OUTRIDER_TLS_KEY.
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
    """Return why the service cannot serve; None if it can."""
    try:
        tls = Tls.load(**{name: os.environ.get(f"OUTRIDER_TLS_{name.upper()}", "") for name in ("cert", "key", "ca")})
    except StartupError as error:
        return f"{service} at {address}: {error.message}"
    # A proxy configured for the container must not be used for calls inside it.
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
