"""Fleets to measure: started on this machine with toy models or a target, or running elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.bench.common.remote_pair import make_pair
from outrider.bench.fleet.options import FleetExtent, FleetSize
from outrider.bench.overhead.concurrent_rounds import cpu_seconds
from outrider.client.sync import Client
from outrider.launch.services import Overrides, check_services, merged, read_assignments
from outrider.launch.stack import LaunchPlan, Stack, coordinators, stack, workers
from outrider.models.drafter_choice import AUTO, choose_drafter
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.security.api_keys import ApiKeys
from outrider.security.tls import Tls

LARGE_MODEL = "1:100,64:100,128:180,512:660"  # a large model's step: flat, then by its tokens
_DRAFT_MS = 4.0
_SESSION_TOKENS = 1024  # at most, of a toy model's session


@dataclass(frozen=True, slots=True)
class FleetUnderLoad:
    """A fleet that serves, and how to reach it."""

    size: FleetSize
    endpoints: tuple[str, ...]
    cpu_seconds: Callable[[], Mapping[str, float]]  # so far, by process on this machine
    api_key: str = ""
    tls: Tls | None = None
    model: str = ""


def toy_plan(folder: Path, acceptance: float, verify_pace: str) -> LaunchPlan:
    """Return a plan with toy models: every step takes as long as a large model's, and guesses have this acceptance."""
    pair = make_pair(folder, acceptance)
    paces = read_assignments([f"verifier.pace={verify_pace}", f"drafter.pace=1:{_DRAFT_MS:g}"])
    drafters = (("model", str(pair.draft)),)
    cpu: dict[str, Any] = {"device": "cpu", "drafter_device": "cpu", "threads": 1}
    return LaunchPlan(target=str(pair.target), drafters=drafters, port=0, overrides=paces, **cpu)


def target_plan(target: str, drafter: str, verify_pace: str) -> LaunchPlan:
    """Return a plan with a real target."""
    pace = read_assignments([f"verifier.pace={verify_pace}"] if verify_pace else [])
    return LaunchPlan(target=target, drafters=(choose_drafter(drafter or AUTO, target),), port=0, overrides=pace)


def with_room(plan: LaunchPlan, extent: FleetExtent, given: Overrides, toys: bool) -> LaunchPlan:
    """Return a plan whose services take all sessions; the user's settings override it."""
    most = max(extent.sessions)
    room = [f"{service}.max-sessions={max(64, most)}" for service in ("verifier", "drafter")]
    room.append(f"coordinator.max-sessions={max(512, most)}")
    room += [f"verifier.kv-tokens={(_SESSION_TOKENS + 2 * extent.tokens) * most}"] if toys else []
    return replace(plan, overrides=merged(merged(plan.overrides, read_assignments(room)), given))


@contextlib.contextmanager
def started_fleet(plan: LaunchPlan, size: FleetSize, tick: Callable[[Stack], None]) -> Iterator[FleetUnderLoad]:
    """Start a fleet, yield it when every worker is registered with every coordinator, stop it."""
    overrides = {name: own for name, own in plan.overrides.items() if _is_in(size, name)}
    with stack(replace(_sized(plan, size), overrides=overrides), tick) as running:
        for endpoint in running.endpoints:
            running.wait_workers(endpoint, size.verifiers + size.drafters, tick)
        key, tls = running.access.key, running.access.tls
        yield FleetUnderLoad(size, tuple(running.endpoints), lambda: cpu_seconds(running), key, tls)


def check_settings(plan: LaunchPlan, extent: FleetExtent) -> None:
    """Raise StartupError for settings with which the largest fleet cannot start."""
    largest = FleetSize(*(max(counts) for counts in zip(*map(astuple, extent.sizes), strict=True)))
    for specs in (coordinators(_sized(plan, largest), ""), workers(_sized(plan, largest), [])):
        check_services(specs)


def running_fleet(flags: Mapping[str, Any]) -> FleetUnderLoad:
    """Return the fleet at --endpoint, with its size as its first coordinator tells it."""
    endpoints = tuple(part.strip() for part in flags["endpoint"].split(","))
    key = ApiKeys.parse(flags["api_key"], "api_key").first
    tls = Tls.load(cert=flags["tls_cert"], key=flags["tls_key"], ca=flags["tls_ca"], name=flags["tls_name"])
    with Client(endpoints, api_key=key, tls=tls) as client:
        served = client.model(flags["model"])
        workers = client.server().workers
    drafters = sum(worker.role is Role.DRAFTER for worker in workers)
    size = FleetSize(len(verifiers_of(workers, served)), len(endpoints), drafters)
    return FleetUnderLoad(size, endpoints, lambda: {"client": time.process_time()}, key, tls, flags["model"])


def verifiers_of(workers: Iterable[WorkerInfo], served: ModelInfo) -> list[WorkerInfo]:
    """Return the verifiers of a target, which a coordinator may serve under another name."""
    verifiers = (worker for worker in workers if worker.role is Role.VERIFIER)
    return [each for each in verifiers if each.model.name == served.name or each.model.text_id == served.text_id]


def _sized(plan: LaunchPlan, size: FleetSize) -> LaunchPlan:
    drafters = plan.drafters * size.drafters
    return replace(plan, verifiers=size.verifiers, coordinators=size.coordinators, drafters=drafters)


def _is_in(size: FleetSize, name: str) -> bool:
    """Return whether a service's settings, such as those of verifier-3, are for a fleet of this size."""
    kind, _, number = name.partition("-")
    return not number.isdecimal() or int(number) <= getattr(size, f"{kind}s")
