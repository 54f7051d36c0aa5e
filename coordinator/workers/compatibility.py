"""Compatibility: verifiers of one name serve one target, and drafters fit one that is served."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import replace
from itertools import chain

import grpc
import structlog

from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.target import Target, fetch_target
from coordinator.workers.targets.fit import check_drafter, fits, shares_vocabulary, target_mismatch
from coordinator.workers.targets.known_targets import KnownTargets
from coordinator.workers.worker_connection import worker_error
from outrider.base import endpoint
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.vocabulary import Vocabulary
from outrider.v1 import verifier_pb2_grpc

log = structlog.get_logger(__name__)


class Compatibility:
    """Check of workers against the targets. A verifier may define a new one."""

    def __init__(
        self, fleet: FleetKeys, targets: KnownTargets, verifiers: Callable[[str], Sized], *, mixed: bool = False
    ) -> None:
        """Make the checks; `verifiers` returns those of a target."""
        self._targets = targets
        self._fleet = fleet
        self._verifiers = verifiers
        self._mixed = mixed  # verifiers of the same weights may differ in the text of near-ties

    def check(self, info: WorkerInfo) -> bool:
        """Raise ModelMismatch for a worker that does not fit; return whether it defines a new target."""
        if not info.worker_id or not info.address:
            raise InvalidRequest.of("worker", info.worker_id or info.address, "given with a worker_id and an address")
        endpoint.split(info.address)  # other coordinators would not read its record
        if info.role is Role.DRAFTER:
            check_drafter(info.model, self._targets)
            return False
        same = self._targets.of(self.identity(info.model))
        if same is not None and same.info.eos_token_ids == info.model.eos_token_ids:
            if (first := same.info.name) != info.model.name:
                log.warning("equal weights under two names: the first counts", first=first, second=info.model.name)
            return False
        for known in self._targets:
            if (known is same or known.info.name == info.model.name) and self._verifiers(known.identity):
                raise target_mismatch(known, info)
        self._targets.check_room(self._verifiers)
        return True

    def other_vocabularies(self, info: WorkerInfo) -> list[Vocabulary]:
        """Return the vocabularies of the targets to compare a drafter's with, if none of them has the drafter's."""
        alone = not info.model.vocabulary_digest or any(shares_vocabulary(info.model, it.info) for it in self._targets)
        return [] if alone or info.role is Role.VERIFIER else [known.vocabulary for known in self._targets]

    @property
    def served(self) -> list[Target]:
        """Return the targets that have verifiers."""
        return [it for it in self._targets if self._verifiers(it.identity)]

    def adapted(self, told: ModelInfo, now: ModelInfo, tokens: tuple[str, ...]) -> ModelInfo:
        """Return a drafter's model with the vocabulary of a served target, its own or a longer one; else `now`."""
        own = {it.vocabulary.digest: it.vocabulary.tokens for it in self._targets}.get(told.vocabulary_digest, tokens)
        longer = (it.info.vocabulary_digest for it in self.served if own and it.vocabulary.tokens[: len(own)] == own)
        models = chain((told, now), (replace(told, vocabulary_digest=digest) for digest in longer))
        return next((model for model in models if any(fits(model, it.info) for it in self.served)), now)

    def identity(self, model: ModelInfo) -> str:
        """Return what the verifiers of one target have in common."""
        return model.weights_digest if self._mixed and model.weights_digest else model.text_id

    async def fetch(self, info: WorkerInfo) -> Target:
        """Return a verifier's target, for which it is asked."""
        async with self._fleet.access(Role.VERIFIER).aio_channel(info.address) as channel:
            stub: verifier_pb2_grpc.VerifierAsyncStub = verifier_pb2_grpc.VerifierStub(channel)  # type: ignore[assignment]
            try:
                return await fetch_target(info.model, self.identity(info.model), stub)
            except grpc.aio.AioRpcError as error:
                raise worker_error(info.address, error) from error
