"""Delivery of projections over real sockets: what counts as delivered, as refused, and as neither."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from coordinator.sessions.hidden_states import delivery as module
from coordinator.sessions.hidden_states.delivery import ProjectionDelivery
from coordinator.sessions.hidden_states.session_states import SessionStates
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.known_workers import KnownWorkers
from drafter.hidden_states.declaration import StateDeclaration
from outrider.base.aio import background, until
from outrider.hidden_states.projection import PackedProjection
from outrider.protocol.errors import ModelMismatch
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.security.error_interceptor import ErrorInterceptor
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from verifier.hidden_states.projections import Projections, ProjectionService

WIDTH = 4
MODEL = ModelInfo("m", "f")


class Taker(ProjectionService, verifier_pb2_grpc.VerifierServicer):
    def __init__(self) -> None:
        self.projections = Projections((8, WIDTH), torch.device("cpu"))


class Giver(StateDeclaration, drafter_pb2_grpc.DrafterServicer):
    """A drafter that ends its first transfers early."""

    def __init__(self, projection: PackedProjection, early: int) -> None:
        self._projection = projection
        self._early = early

    async def GetProjection(
        self, request: draft.GetProjectionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[common.ProjectionPart]:
        async for part in super().GetProjection(request, context):
            if part.data and self._early > 0:
                self._early -= 1
                return
            yield part


@asynccontextmanager
async def delivering(early: int = 0) -> AsyncIterator[tuple[ProjectionDelivery, KnownWorkers, WorkerInfo, WorkerInfo]]:
    """Yield a delivery at work between a verifier and a drafter, which is not known yet."""
    given = PackedProjection({"fc.weight": torch.ones(3, 2 * WIDTH)}, 1e-5, (1, 2))
    server = grpc.aio.server(interceptors=[ErrorInterceptor(5.0)])
    verifier_pb2_grpc.add_VerifierServicer_to_server(Taker(), server)  # type: ignore[no-untyped-call,unused-ignore]
    drafter_pb2_grpc.add_DrafterServicer_to_server(  # type: ignore[no-untyped-call,unused-ignore]
        Giver(given, early), server
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    workers = KnownWorkers(FleetKeys())
    verifier = WorkerInfo("v", Role.VERIFIER, address, MODEL, state_layers=8, state_width=WIDTH)
    drafter = WorkerInfo("d", Role.DRAFTER, address, MODEL, hidden_states=True, state_spec=given.spec)
    await workers.put(verifier)
    delivery = ProjectionDelivery(workers)
    try:
        async with background(delivery.run()):
            yield delivery, workers, verifier, drafter
    finally:
        for worker in (verifier, drafter):
            await workers.drop(worker.worker_id)
        await server.stop(None)


def spec_of(drafter: WorkerInfo) -> StateSpec:
    assert drafter.state_spec is not None
    return drafter.state_spec


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.01)


async def test_one_digest_with_other_layers_is_not_delivered_but_refused() -> None:
    async with delivering() as (delivery, workers, verifier, drafter):
        await workers.put(drafter)
        assert await until(lambda: delivery.feeds(verifier, spec_of(drafter)), 20)
        elsewhere = drafter.address.replace("127.0.0.1", "localhost")  # of two at one address, one has been restarted
        spec = replace(spec_of(drafter), layers=(1,))
        other = replace(drafter, worker_id="e", address=elsewhere, state_spec=spec)
        assert not delivery.feeds(verifier, spec)
        await workers.put(other)
        assert await until(lambda: bool(delivery._refused), 20)
        with pytest.raises(ModelMismatch, match=r"refuses its projection: states\.layers is \[1\], must be 2 layers"):
            delivery.check(other)
        assert not delivery.feeds(verifier, spec)
        assert delivery.feeds(verifier, spec_of(drafter))
        await workers.drop("e")


@pytest.mark.parametrize("projected", [True, False])
async def test_a_drafter_of_a_target_of_another_width_is_refused_and_never_asked(*, projected: bool) -> None:
    async with delivering() as (delivery, workers, verifier, drafter):
        spec = spec_of(drafter) if projected else None
        fitting = replace(drafter, state_spec=spec, state_width=WIDTH)
        wide = replace(fitting, worker_id="w", state_width=2 * WIDTH)
        await workers.put(fitting)
        assert await until(lambda: not projected or delivery.feeds(verifier, spec_of(drafter)), 20)
        states = SessionStates(delivery)
        states.begin(verifier)
        assert [states.accepts(each) for each in (fitting, replace(fitting, state_width=0), wide)] == [
            True,
            True,
            False,
        ]
        delivery.check(fitting)
        with pytest.raises(ModelMismatch, match=r"of a target of width 8; verifier \S+ sends those of width 4"):
            delivery.check(wide)


async def test_a_transfer_that_ended_early_is_tried_again() -> None:
    async with delivering(early=2) as (delivery, workers, verifier, drafter):
        await workers.put(drafter)
        assert await until(lambda: delivery.feeds(verifier, spec_of(drafter)), 20)
        delivery.check(drafter)


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REFUSED", 2)
    async with delivering() as (delivery, workers, verifier, drafter):
        await workers.put(drafter)
        assert await until(lambda: delivery.feeds(verifier, spec_of(drafter)), 20)
        delivery._refused |= {("v", str(number)): "refused" for number in range(5)}
        spec = replace(spec_of(drafter), width=7)
        delivery._delivered |= {module._delivery(verifier, spec)}
        assert await until(lambda: not delivery.feeds(verifier, spec), 20), "no drafter reads it any more"
        assert await until(lambda: sorted(delivery._refused) == [("v", "3"), ("v", "4")], 20)
        assert delivery.feeds(verifier, spec_of(drafter))
