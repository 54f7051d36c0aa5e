"""The projections that a verifier holds: given by coordinators, bounded, and checked before they are used."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import structlog
import torch

from outrider.base.aio import first_message
from outrider.hidden_states.projection import MAX_BYTES, Projection
from outrider.protocol import convert
from outrider.protocol.errors import Expired, InvalidRequest
from outrider.protocol.fleet import WorkerInfo
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as pb

log = structlog.get_logger(__name__)

MAX_HELD = 8
MAX_HELD_BYTES = 2 * MAX_BYTES
_PART_TIMEOUT_S = 10.0


class Projections:
    """Projections by digest, the last used last. Sessions look theirs up in every step, so a dropped one is freed."""

    def __init__(self, state_shape: tuple[int, int], device: torch.device) -> None:
        """Hold projections of a target; `state_shape` is that of its engine."""
        self.num_layers, self.width = state_shape
        self._device = device
        self._held: dict[str, Projection] = {}
        self._receiving = asyncio.Lock()  # the memory of one projection at a time

    def describe(self, about: WorkerInfo) -> WorkerInfo:
        return replace(about, state_layers=self.num_layers, state_width=self.width)

    def check(self, spec: StateSpec) -> None:
        """Raise InvalidRequest for states that the target does not have, or for an unknown projection."""
        self._check_layers(spec)
        inputs = max(1, len(spec.layers)) * self.width
        if spec.projection and spec.projection not in self._held:
            raise InvalidRequest.of("states.projection", spec.projection, "one that the verifier has")
        width = self._held[spec.projection].width if spec.projection else inputs
        if spec.width and self.width and spec.width != width:
            raise InvalidRequest.of("states.width", spec.width, f"{width}, or 0")

    def find(self, digest: str) -> Projection | None:
        """Return a projection; the engine's thread calls it."""
        return self._held.get(digest)

    async def receive(self, parts: AsyncIterator[common.ProjectionPart]) -> AsyncIterator[bool]:
        """Take a projection; yield whether its data are wanted, and then that they no longer are."""
        head = (await first_message(parts, _PART_TIMEOUT_S, "head")).head
        spec = convert.state_spec_from_proto(head.spec)
        if not spec.projection:
            raise InvalidRequest.of("head.spec.projection", "empty", "the digest of the data")
        self._check_layers(spec)
        if not 1 <= head.size <= MAX_BYTES:
            raise InvalidRequest.of("head.size", head.size, f"1 to {MAX_BYTES} bytes")
        async with self._receiving:
            if spec.projection not in self._held:
                yield True
                data = await _read(parts, head.size)
                self._add(spec.projection, await asyncio.to_thread(self._projection, spec, data))
            self._held[spec.projection] = self._held.pop(spec.projection)
        yield False

    def _check_layers(self, spec: StateSpec) -> None:
        if spec.layers and not self.num_layers:
            raise InvalidRequest.of("states.layers", list(spec.layers), "none: this engine captures no layers")
        if max(spec.layers, default=0) > self.num_layers:
            raise InvalidRequest.of("states.layers", list(spec.layers), f"1 to {self.num_layers}, the target's layers")

    def _projection(self, spec: StateSpec, data: bytes) -> Projection:
        if hashlib.sha256(data).hexdigest() != spec.projection:
            raise InvalidRequest.of("data", "of another digest", spec.projection)
        projection = Projection(data, max(1, len(spec.layers)), self.width, self._device)
        if projection.width != spec.width:
            raise InvalidRequest.of("head.spec.width", spec.width, f"{projection.width}, as in the data")
        return projection

    def _add(self, digest: str, projection: Projection) -> None:
        self._held[digest] = projection
        while len(self._held) > MAX_HELD or sum(each.num_bytes for each in self._held.values()) > MAX_HELD_BYTES:
            log.info("projection dropped", digest=(oldest := next(iter(self._held))))
            del self._held[oldest]
        log.info("projection received", digest=digest, num_bytes=projection.num_bytes)


class ProjectionService:
    """The part of the verifier's service that takes projections."""

    projections: Projections

    async def PutProjection(
        self, requests: AsyncIterator[common.ProjectionPart], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ProjectionReply]:
        async for wanted in self.projections.receive(requests):
            yield pb.ProjectionReply(wanted=wanted)


async def _read(parts: AsyncIterator[common.ProjectionPart], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            async with asyncio.timeout(_PART_TIMEOUT_S):
                part = await anext(parts, None)
        except TimeoutError as error:
            raise Expired(f"no data of the projection for {_PART_TIMEOUT_S:g} s") from error
        if part is None or not part.data:
            raise InvalidRequest.of("data", f"{len(data)} bytes", f"{size} bytes, as in the head")
        data += part.data
    if len(data) > size:
        raise InvalidRequest.of("data", f"{len(data)} bytes", f"{size} bytes, as in the head")
    return bytes(data)
