"""The part of the drafter's service that says which hidden states it reads, and gives verifiers its projection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from drafter.hidden_states.earlier_states import earlier_positions
from drafter.interface import Drafter
from outrider.base.aio import Call
from outrider.hidden_states.parts import projection_parts
from outrider.protocol.errors import NotFound
from outrider.protocol.fleet import WorkerInfo
from outrider.protocol.hidden_states.messages import FINAL_STATES
from outrider.settings.drafter import DrafterSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as pb

if TYPE_CHECKING:  # it needs torch, which not every drafter has
    from outrider.hidden_states.projection import PackedProjection


class StateDeclaration:
    """A drafter's projection and spec."""

    _projection: PackedProjection | None

    def declare(self, about: WorkerInfo, drafter: Drafter, settings: DrafterSettings) -> WorkerInfo:
        """Return the drafter's description with what it reads. No spec: the final states as float16, or none."""
        self._projection = getattr(drafter, "projection", None)
        if not drafter.needs_hidden_states:
            return about
        final = FINAL_STATES if self._projection is None else self._projection.spec
        spec = replace(final, float8=settings.feature_dtype == "fp8")
        earlier = earlier_positions(drafter, settings.kv_tokens)
        about = replace(about, earlier_states=earlier, state_width=getattr(drafter, "target_width", 0))
        return replace(about, state_spec=None if spec == FINAL_STATES else spec)

    async def GetProjection(
        self, request: pb.GetProjectionRequest, context: Call
    ) -> AsyncIterator[common.ProjectionPart]:
        if self._projection is None:
            raise NotFound("this drafter has no projection")
        for part in projection_parts(self._projection.spec, self._projection.data):
            yield part
