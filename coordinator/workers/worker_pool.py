"""Worker pool: the verifiers and drafters that sessions may use, least loaded first."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from coordinator.placement.choice import least_loaded
from coordinator.workers.compatibility import Compatibility
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.known_workers import KnownWorkers
from coordinator.workers.shunned import ShunnedWorkers
from coordinator.workers.target import Target
from coordinator.workers.targets.known_targets import KnownTargets, ModelNames
from coordinator.workers.worker_connection import WorkerConnection
from outrider.protocol.fleet import Role, SamplingDefaults, WorkerInfo
from outrider.settings.coordinator import CoordinatorSettings

log = structlog.get_logger(__name__)

POLL_S = 0.1
Fits = Callable[[WorkerConnection], bool]
Pick = Callable[[Sequence[WorkerConnection]], WorkerConnection]


class WorkerPool:
    """Choice among the workers that `registrations` adds."""

    def __init__(
        self, fleet: FleetKeys, settings: CoordinatorSettings, on_target: Callable[[str], object] = lambda _: None
    ) -> None:
        """Start empty; `on_target` is called with each new target's name, before its first session."""
        self.workers = KnownWorkers(fleet)
        self.shunned = ShunnedWorkers()
        self.targets = KnownTargets(ModelNames.read(settings.served_model_name, settings.default_model, settings.alias))
        self.compatibility = Compatibility(fleet, self.targets, self.verifiers, mixed=settings.mixed_verifiers)
        self._on_target = on_target

    @property
    def ready(self) -> bool:
        return any(map(self.usable, self.workers.of(Role.VERIFIER)))

    def verifiers(self, identity: str) -> list[WorkerConnection]:
        """Return the verifiers of a target."""
        same = self.compatibility.identity
        return [each for each in self.workers.of(Role.VERIFIER) if same(each.info.model) == identity]

    def connections(self) -> list[WorkerConnection]:
        return list(self.workers)

    def infos(self) -> list[WorkerInfo]:
        """Return the workers with their measured round trips."""
        return [replace(connection.info, round_trip_ms=connection.round_trip_ms) for connection in self.connections()]

    def usable(self, connection: WorkerConnection) -> bool:
        return connection.usable() and not self.shunned.is_shunned(connection.info)

    def state(self, connection: WorkerConnection) -> str:
        """Return the state as a metric label."""
        if self.shunned.is_shunned(connection.info):
            return "shunned"
        if connection.info.draining:
            return "draining"
        return "resting" if connection.is_silent or not connection.usable() else "usable"

    def agree_on_sampling(self) -> None:
        """Give each target the sampling defaults that most of its verifiers state, the same at every coordinator."""
        for target in self.targets:
            stated = Counter(verifier.info.model.sampling for verifier in self.verifiers(target.identity))
            del stated[SamplingDefaults()]  # which a coordinator of an older version does not pass on
            most = max(sorted(stated, key=str), key=stated.__getitem__, default=target.info.sampling)
            if most != target.info.sampling:
                log.info("sampling defaults set", model=target.info.name, verifiers=stated[most], sampling=str(most))
                changed = replace(target, info=replace(target.info, sampling=most))
                self.targets.add(changed, lambda _: self.connections())  # no other one is forgotten

    def add(self, target: Target) -> None:
        """Add a new target. Drafters that fit none any more hear of it with their next reports."""
        self.targets.add(target, self.verifiers)
        self._on_target(target.info.name)
        log.info("target set", model=target.info.name, fingerprint=target.info.fingerprint)

    def choose(self, role: Role, fits: Fits, prefer: str = "", pick: Pick = least_loaded) -> WorkerConnection | None:
        """Return, of the usable workers that fit, the preferred one or else what `pick` returns."""
        usable = [each for each in self.workers.of(role) if self.usable(each) and fits(each)]
        usable = [each for each in usable if not each.is_silent] or usable
        chosen = next((each for each in usable if each.info.worker_id == prefer), None)
        return pick(usable) if chosen is None and usable else chosen

    async def wait_for(
        self, seconds: float, choose: Callable[[], WorkerConnection | None], role: Role, *, poll_s: float = POLL_S
    ) -> WorkerConnection | None:
        """Return a chosen worker of a role, waiting for one if necessary, or None after `seconds`."""
        deadline = time.monotonic() + seconds
        while (connection := choose()) is None and time.monotonic() < deadline:
            self.workers.added.clear()
            # Polled, because a backoff ends without an event; not for a first worker, which is an event.
            most_s = poll_s if self.workers.of(role) else seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(min(most_s, max(0.01, deadline - time.monotonic()))):
                    await self.workers.added.wait()
        return connection

    def has_spare(self, silent: WorkerConnection) -> bool:
        """Return whether another worker could take a silent one's sessions."""
        role, model = silent.info.role, silent.info.model
        alike = self.verifiers(self.compatibility.identity(model)) if role is Role.VERIFIER else self.workers.of(role)
        others = (each for each in alike if each is not silent and self.usable(each) and not each.is_silent)
        return any(role is Role.DRAFTER or each.info.model.eos_token_ids == model.eos_token_ids for each in others)
