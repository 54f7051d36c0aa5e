"""Compatibility: verifiers of a pool serve one target, and drafters fit it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.target import Target, fetch_target
from coordinator.workers.worker_connection import worker_error
from outrider.protocol.errors import InvalidRequest, ModelMismatch
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.v1 import verifier_pb2_grpc

log = structlog.get_logger(__name__)


class Compatibility:
    """The target, which the first verifier defines, and the checks of workers against it."""

    def __init__(
        self,
        fleet: FleetKeys,
        has_verifiers: Callable[[], bool],
        on_target: Callable[[ModelInfo], object],
        *,
        mixed: bool = False,
    ) -> None:
        self.target: Target | None = None
        self._fleet = fleet
        self._has_verifiers = has_verifiers
        self._on_target = on_target
        self._mixed = mixed  # verifiers of the same weights may differ in the text of near-ties
        self._lock = asyncio.Lock()

    def vocabulary_differs(self, info: WorkerInfo) -> bool:
        return (
            info.role is Role.DRAFTER
            and bool(info.model.vocabulary_digest)
            and self.target is not None
            and info.model.vocabulary_digest != self.target.info.vocabulary_digest
        )

    async def check(self, info: WorkerInfo) -> bool:
        """Raise ModelMismatch for a worker that does not fit; return whether it defines a new target."""
        if not info.worker_id or not info.address:
            raise InvalidRequest.of("worker", info.worker_id or info.address, "given with a worker_id and an address")
        if info.role is Role.VERIFIER:
            return await self._check_verifier(info)
        self.check_drafter(info)
        return False

    def check_drafter(self, info: WorkerInfo) -> None:
        if self.target is None:
            return
        name, target = info.model.name, self.target.info
        if self.vocabulary_differs(info):
            raise ModelMismatch(f"drafter {name} has another vocabulary than target {target.name}")
        if info.model.target_digest not in ("", target.weights_digest):
            raise ModelMismatch(
                f"drafter {name} was trained for another target than {target.name}: its guesses would fail. Train one "
                "for this target with `outrider train`",
                field="model.target_digest",
                value=info.model.target_digest,
                limit=target.weights_digest,
            )

    def identity(self, model: ModelInfo) -> str:
        """Return what the verifiers of one target have in common."""
        return model.weights_digest if self._mixed and model.weights_digest else model.text_id

    async def _check_verifier(self, info: WorkerInfo) -> bool:
        async with self._lock:
            known = self.target
            if known is not None and known.identity == self.identity(info.model):
                return False
            if known is not None and self._has_verifiers():
                raise _target_mismatch(known, info)
            async with self._fleet.access(Role.VERIFIER).aio_channel(info.address) as channel:
                stub: verifier_pb2_grpc.VerifierAsyncStub = verifier_pb2_grpc.VerifierStub(channel)  # type: ignore[assignment]
                try:
                    self.target = await fetch_target(info.model, self.identity(info.model), stub)
                except grpc.aio.AioRpcError as error:
                    raise worker_error(info.address, error) from error
            self._on_target(self.target.info)
            log.info("target set", model=info.model.name, fingerprint=info.model.fingerprint)
            return True


def _target_mismatch(known: Target, info: WorkerInfo) -> ModelMismatch:
    ours, theirs = known.info, info.model
    for name in ("architecture", "vocab_size", "vocabulary_digest", "dtype", "parameters", "fingerprint"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return ModelMismatch(
                f"verifier {info.worker_id} serves {theirs.name}, the others {ours.name}; first difference: "
                f"{name} is {other}, must be {mine}",
                field=f"model.{name}",
                value=other,
                limit=mine,
            )
    return ModelMismatch(f"verifier {info.worker_id} serves another target")
