"""Messages that carry a projection."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.protocol.hidden_states.messages import StateSpec
from outrider.v1 import common_pb2 as common

PART_BYTES = 32 * 1024  # coordinators read only small messages from drafters


def spec_to_proto(spec: StateSpec) -> common.StateSpec:
    return common.StateSpec(
        layers=spec.layers, projection=spec.projection, width=spec.width, float8=spec.float8, number=spec.number
    )


def projection_parts(spec: StateSpec, data: bytes) -> Iterator[common.ProjectionPart]:
    """Yield the messages that carry a projection."""
    yield common.ProjectionPart(head=common.ProjectionHead(spec=spec_to_proto(spec), size=len(data)))
    for start in range(0, len(data), PART_BYTES):
        yield common.ProjectionPart(data=data[start : start + PART_BYTES])
