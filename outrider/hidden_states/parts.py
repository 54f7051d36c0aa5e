"""Messages that carry a projection."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.protocol.convert import state_spec_to_proto
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.v1 import common_pb2 as common

PART_BYTES = 32 * 1024  # coordinators read only small messages from drafters


def projection_parts(spec: StateSpec, data: bytes) -> Iterator[common.ProjectionPart]:
    """Yield the messages that carry a projection."""
    yield common.ProjectionPart(head=common.ProjectionHead(spec=state_spec_to_proto(spec), size=len(data)))
    for start in range(0, len(data), PART_BYTES):
        yield common.ProjectionPart(data=data[start : start + PART_BYTES])
