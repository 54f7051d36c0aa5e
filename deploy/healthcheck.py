"""`healthcheck.py ADDRESS SERVICE`: exits 0 when the service says that it can serve, else 1 with the reason."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def trouble(address: str, service: str) -> str | None:
    """What keeps the service from serving; None if nothing does."""
    # A proxy set for the container is not meant for calls inside it.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
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
