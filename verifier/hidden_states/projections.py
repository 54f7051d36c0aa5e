"""The projections that a verifier holds: given by coordinators, bounded, and checked before they are used."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence

import structlog
import torch

from outrider.base.aio import Call, first_message
from outrider.hidden_states.projection import MAX_BYTES, Projection
from outrider.protocol import convert
from outrider.protocol.errors import Expired, InvalidRequest, Overloaded
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as pb

log = structlog.get_logger(__name__)

MAX_HELD = 8
MAX_HELD_BYTES = 2 * MAX_BYTES
MIN_WIDTH_LIMIT = 16_384  # numbers per position; wider targets allow twice their width
_PART_TIMEOUT_S = 10.0
_MIN_BYTES_PER_S = 4e6  # of a transfer: others wait for it
_IN_USE_S = 60.0  # since the last step with it, a projection is not dropped


class Projections:
    """Projections by digest, the last used last. Sessions look theirs up in every step, so a dropped one is freed."""

    def __init__(self, state_shape: tuple[int, int], device: torch.device, layers: Sequence[int] | None = None) -> None:
        """Hold projections of a target, whose engine has `state_shape` and captures `layers`; None: any."""
        self.num_layers, self.width = state_shape
        self._layers = layers
        self._device = device
        self._held: dict[str, Projection] = {}
        self._receiving = asyncio.Lock()  # the memory of one projection at a time

    def check(self, spec: StateSpec) -> None:
        """Raise InvalidRequest for states that the target does not have, or for an unknown projection."""
        self._check_shape(spec)
        num_states = max(1, len(spec.layers))
        held = self._held.get(spec.projection)
        if spec.projection and held is None:
            raise InvalidRequest.of("states.projection", spec.projection, "one that the verifier has")
        if held is not None and held.num_states != num_states:
            raise InvalidRequest.of("states.layers", list(spec.layers), f"{held.num_states} layers, as in its data")
        width = num_states * self.width if held is None else held.width
        if spec.width and self.width and spec.width != width:
            raise InvalidRequest.of("states.width", spec.width, f"{width}, or 0")

    def find(self, digest: str) -> Projection | None:
        """Return a projection for a step; the engine's thread calls it."""
        if (projection := self._held.get(digest)) is not None:
            projection.used_at = time.monotonic()
        return projection

    async def receive(self, parts: AsyncIterator[common.ProjectionPart]) -> AsyncIterator[bool]:
        """Take a projection; yield whether its data are wanted, and then that they no longer are."""
        head = (await first_message(parts, _PART_TIMEOUT_S, "head")).head
        spec = convert.state_spec_from_proto(head.spec)
        if not spec.projection:
            raise InvalidRequest.of("head.spec.projection", "empty", "the digest of the data")
        self._check_shape(spec)
        if not 1 <= head.size <= MAX_BYTES:
            raise InvalidRequest.of("head.size", head.size, f"1 to {MAX_BYTES} bytes")
        async with self._receiving:
            if spec.projection in self._held:
                self.check(spec)
            else:
                self._make_room(head.size)
                yield True
                data = await _read(parts, head.size)
                projection = await asyncio.to_thread(self._projection, spec, data)
                self._make_room(projection.num_bytes)
                self._held[spec.projection] = projection
                log.info("projection received", digest=spec.projection, num_bytes=projection.num_bytes)
            self._held[spec.projection] = self._held.pop(spec.projection)
        yield False

    def _check_shape(self, spec: StateSpec) -> None:
        if (spec.layers or spec.projection) and not self.num_layers:
            raise InvalidRequest.of("states.layers", list(spec.layers), "none: this engine captures no layers")
        if max(spec.layers, default=0) > self.num_layers:
            raise InvalidRequest.of("states.layers", list(spec.layers), f"1 to {self.num_layers}, the target's layers")
        if self._layers is not None and not set(spec.layers) <= set(self._layers):
            raise InvalidRequest.of("states.layers", list(spec.layers), f"{list(self._layers)}, its --state-layers")
        width = spec.width if spec.projection else max(spec.width, len(spec.layers) * self.width)
        if width > (limit := max(MIN_WIDTH_LIMIT, 2 * self.width)):
            raise InvalidRequest.of("states.width", width, f"at most {limit}")

    def _projection(self, spec: StateSpec, parts: list[bytes]) -> Projection:
        data = b"".join(parts)
        parts.clear()
        if hashlib.sha256(data).hexdigest() != spec.projection:
            raise InvalidRequest.of("data", "of another digest", spec.projection)
        projection = Projection(data, max(1, len(spec.layers)), self.width, self._device)
        if projection.width != spec.width:
            raise InvalidRequest.of("head.spec.width", spec.width, f"{projection.width}, as in the data")
        return projection

    def _make_room(self, num_bytes: int) -> None:
        """Drop the projections used longest ago. Raise Overloaded if those in use leave no room."""
        limit = MAX_HELD_BYTES - num_bytes
        while len(self._held) >= MAX_HELD or sum(each.num_bytes for each in self._held.values()) > limit:
            oldest = min(self._held, key=lambda digest: self._held[digest].used_at)
            if time.monotonic() - self._held[oldest].used_at < _IN_USE_S:
                raise Overloaded.of("projections in use", len(self._held), f"below {MAX_HELD}, of {limit} bytes")
            log.info("projection dropped", digest=oldest)
            del self._held[oldest]


class ProjectionService:
    """The part of the verifier's service that takes projections."""

    projections: Projections

    async def PutProjection(
        self, requests: AsyncIterator[common.ProjectionPart], context: Call
    ) -> AsyncIterator[pb.ProjectionReply]:
        async for wanted in self.projections.receive(requests):
            yield pb.ProjectionReply(wanted=wanted)


async def _read(parts: AsyncIterator[common.ProjectionPart], size: int) -> list[bytes]:
    data: list[bytes] = []
    missing = size
    try:
        async with asyncio.timeout(_PART_TIMEOUT_S + size / _MIN_BYTES_PER_S):
            while missing > 0:
                async with asyncio.timeout(_PART_TIMEOUT_S):
                    part = await anext(parts, None)
                if part is None or not part.data:
                    break
                data.append(part.data)
                missing -= len(part.data)
    except TimeoutError as error:
        raise Expired(f"the projection arrives too slowly: {size - missing} of {size} bytes") from error
    if missing:
        raise InvalidRequest.of("data", f"{size - missing} bytes", f"{size} bytes, as in the head")
    return data
