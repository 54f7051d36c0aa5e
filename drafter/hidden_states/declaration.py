"""The part of the drafter's service that says which hidden states it reads, and gives verifiers its projection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from drafter.interface import Drafter, ReadsLayers
from outrider.hidden_states.parts import projection_parts
from outrider.protocol.errors import NotFound
from outrider.protocol.hidden_states.messages import FINAL_STATES, StateSpec
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as pb

if TYPE_CHECKING:  # it needs torch, which not every drafter has
    from outrider.hidden_states.projection import PackedProjection


class StateDeclaration:
    """A drafter's projection and spec."""

    _projection: PackedProjection | None

    def declare(self, drafter: Drafter, *, float8: bool) -> StateSpec | None:
        """Return the states that a drafter reads; None: the final ones as float16, or none."""
        self._projection = drafter.projection if isinstance(drafter, ReadsLayers) else None
        if not drafter.needs_hidden_states or (self._projection is None and not float8):
            return None
        spec = FINAL_STATES if self._projection is None else self._projection.spec
        return replace(spec, float8=float8)

    async def GetProjection(
        self, request: pb.GetProjectionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[common.ProjectionPart]:
        if self._projection is None:
            raise NotFound("this drafter has no projection")
        for part in projection_parts(self._projection.spec, self._projection.data):
            yield part
