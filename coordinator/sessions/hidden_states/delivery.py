"""Delivery of projections: from each drafter to each verifier, once and in the background.

Neither side is trusted. A projection passes in small parts and is never held here. The verifier checks it; one that it
refuses costs its drafter the work for that verifier, and no session anything.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import structlog

from coordinator.workers.known_workers import KnownWorkers
from coordinator.workers.targets.fit import fits
from coordinator.workers.worker_connection import WorkerConnection, worker_error
from outrider.base.aio import cancel_all
from outrider.protocol.convert import state_spec_to_proto
from outrider.protocol.errors import InvalidRequest, ModelMismatch, OutriderError, PeerLost, ProtocolViolation
from outrider.protocol.fleet import Role, WorkerInfo
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft

log = structlog.get_logger(__name__)

POLL_S = 0.2
TIMEOUT_S = 900.0  # of one delivery
RETRY_S = 5.0  # after a failure that is no refusal
MAX_REFUSED = 1024  # refusals that are remembered


class ProjectionDelivery:
    """The projections that each verifier has, and those that it refuses."""

    def __init__(self, workers: KnownWorkers) -> None:
        self._workers = workers
        self._delivered: set[tuple[str, StateSpec]] = set()
        self._refused: dict[tuple[str, str], str] = {}  # by verifier and drafter
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}  # by verifier and drafter

    def feeds(self, verifier: WorkerInfo, spec: StateSpec) -> bool:
        """Return whether a verifier sends what a drafter reads."""
        if max(spec.layers, default=0) > verifier.state_layers:
            return False
        return not spec.projection or _delivery(verifier, spec) in self._delivered

    def check(self, worker: WorkerInfo) -> None:
        """Raise ModelMismatch for a drafter that reads what no verifier sends."""
        verifiers = self._workers.of(Role.VERIFIER) if worker.role is Role.DRAFTER else ()
        obstacles = [self._obstacle(verifier.info, worker) for verifier in verifiers]
        if obstacles and all(obstacles):
            raise ModelMismatch(f"drafter {worker.model.name}: {obstacles[0]}", field="state_spec")

    def forget(self, verifier: str, digest: str) -> None:
        """Record that a verifier does not have a projection, so that it is delivered again."""
        self._delivered = {entry for entry in self._delivered if (entry[0], entry[1].projection) != (verifier, digest)}

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            while True:
                self._begin_deliveries()
                await asyncio.sleep(POLL_S)
        finally:
            await cancel_all(list(self._running.values()))

    def _obstacle(self, verifier: WorkerInfo, drafter: WorkerInfo) -> str:
        if not drafter.reads_width_of(verifier):
            theirs = f"verifier {verifier.address} sends those of width {verifier.state_width}"
            return f"it reads hidden states of a target of width {drafter.state_width}; {theirs}"
        if (spec := drafter.state_spec) is None:
            return ""
        if max(spec.layers, default=0) > verifier.state_layers:
            sent = f"those of up to {verifier.state_layers} layers" if verifier.state_layers else "only the final ones"
            return f"it reads hidden states after layers {list(spec.layers)}; verifier {verifier.address} sends {sent}"
        return self._refused.get((verifier.worker_id, drafter.worker_id), "")

    def _begin_deliveries(self) -> None:
        drafters = [
            (drafter, spec)
            for drafter in self._workers.of(Role.DRAFTER)
            if (spec := drafter.info.state_spec) is not None and spec.projection
        ]
        if not drafters:
            return
        verifiers = self._workers.of(Role.VERIFIER)
        self._forget_others(verifiers, [spec for _, spec in drafters])
        for drafter, spec in drafters:
            for verifier in (each for each in verifiers if fits(drafter.info.model, each.info.model)):
                pair = (verifier.info.worker_id, drafter.info.worker_id)
                known = _delivery(verifier.info, spec) in self._delivered
                if not known and pair not in self._running and not self._obstacle(verifier.info, drafter.info):
                    self._running[pair] = asyncio.create_task(self._deliver(verifier, drafter, spec))

    def _forget_others(self, verifiers: list[WorkerConnection], specs: list[StateSpec]) -> None:
        """Forget what was delivered for others; refusals stay, as a refused drafter would come back at once."""
        self._delivered &= {_delivery(each.info, spec) for each in verifiers for spec in specs}
        present = {each.info.worker_id for each in verifiers}
        self._refused = dict([entry for entry in self._refused.items() if entry[0][0] in present][-MAX_REFUSED:])

    async def _deliver(self, verifier: WorkerConnection, drafter: WorkerConnection, spec: StateSpec) -> None:
        pair = (verifier.info.worker_id, drafter.info.worker_id)
        try:
            await _relay(verifier, drafter, spec)
            self._delivered.add(_delivery(verifier.info, spec))
            log.info("projection delivered", drafter=drafter.info.worker_id, verifier=verifier.info.worker_id)
        except (InvalidRequest, ProtocolViolation) as error:
            self._refused[pair] = f"verifier {verifier.info.address} refuses its projection: {error.message}"
            log.warning("projection refused", drafter=pair[1], verifier=pair[0], error=error.message)
        except OutriderError as error:
            log.info("projection not delivered", drafter=pair[1], verifier=pair[0], error=error.message)
            await asyncio.sleep(RETRY_S)
        finally:
            del self._running[pair]


def _delivery(verifier: WorkerInfo, spec: StateSpec) -> tuple[str, StateSpec]:
    """Return what is delivered: two drafters may declare other layers with one digest."""
    return verifier.worker_id, replace(spec, float8=False, number=0)


async def _relay(verifier: WorkerConnection, drafter: WorkerConnection, spec: StateSpec) -> None:
    """Pass a projection on, unless the verifier has it."""
    given: Any = drafter.drafter.GetProjection(draft.GetProjectionRequest(), timeout=TIMEOUT_S)
    taken: Any = verifier.verifier.PutProjection(timeout=TIMEOUT_S)
    try:
        head = await _read(drafter, given)
        if head.WhichOneof("message") != "head":
            raise ProtocolViolation(f"{drafter.info.address} sent a projection without its head")
        size = head.head.size
        declared = common.ProjectionHead(spec=state_spec_to_proto(spec), size=size)
        await _write(verifier, taken, common.ProjectionPart(head=declared))
        if (await _read(verifier, taken)).wanted:
            while size > 0:
                part = await _read(drafter, given)
                if not part.data:
                    raise ProtocolViolation(f"{drafter.info.address} sent less of its projection than it claimed")
                size -= len(part.data)
                await _write(verifier, taken, part)
            await _read(verifier, taken)
    finally:
        given.cancel()
        taken.cancel()


async def _read(worker: WorkerConnection, call: Any) -> Any:
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise worker_error(worker.info.address, error) from error
    if message is None or message is grpc.aio.EOF:
        raise PeerLost(f"{worker.info.address} ended a projection early")
    return message


async def _write(worker: WorkerConnection, call: Any, message: common.ProjectionPart) -> None:
    try:
        await call.write(message)
    except grpc.aio.AioRpcError as error:
        raise worker_error(worker.info.address, error) from error
    except asyncio.InvalidStateError:
        await _read(worker, call)  # it has ended the call: the error is there
