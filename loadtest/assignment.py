"""Assignment of a run's users: target, cases and reference outputs.

The leading process prepares it and sends it to its workers.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any

from loadtest.attempt import fetch_reference
from loadtest.credentials import ClientCredentials
from loadtest.load_clients import GrpcLoadClient, HttpLoadClient, LoadClient
from loadtest.settings import Load, LoadTarget
from loadtest.workload import GRPC, HTTP, Output, cases
from outrider.protocol.errors import OutriderError, Unavailable
from outrider.protocol.fleet import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetInfo:
    """The fleet's target model and capacity."""

    target: str
    model: str  # its name in /v1/models
    capacity: int  # sessions at once


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that a user needs for its requests, except credentials."""

    where: LoadTarget
    load: Load
    model: str
    references: dict[str, Output]

    def client(self, protocol: str, credentials: ClientCredentials) -> LoadClient:
        return _client(protocol, self.where, credentials, self.model)

    def packed(self) -> dict[str, Any]:
        references = {
            name: [output.text, output.token_ids, output.num_tokens] for name, output in self.references.items()
        }
        return {"where": self.where.packed(), "load": self.load.packed(), "model": self.model, "answers": references}

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Assignment:
        references = {
            name: Output(text, None if ids is None else tuple(ids), num_tokens)
            for name, (text, ids, num_tokens) in data["answers"].items()
        }
        return cls(LoadTarget.unpacked(data["where"]), Load(**data["load"]), data["model"], references)


def describe_fleet(where: LoadTarget, credentials: ClientCredentials, load: Load) -> FleetInfo:
    """Query the fleet over every protocol of the load; raise if one does not work."""
    model, capacity = _describe_over_http(where, credentials, load) if load.http_share else ("", 0)
    if not load.grpc_share:
        return FleetInfo(model, model, where.capacity or capacity)
    with _grpc_client(where, credentials).client as client:
        verifiers = [worker for worker in client.server().workers if worker.role is Role.VERIFIER]
        if not verifiers:
            raise Unavailable("the fleet has no verifier")
        served = client.model().name
        capacity = sum(worker.capacity for worker in verifiers if worker.model.name == served)
        return FleetInfo(served, model, where.capacity or capacity)


def prepare_assignment(where: LoadTarget, credentials: ClientCredentials, load: Load, fleet: FleetInfo) -> Assignment:
    """Generate the reference outputs; raise if a request fails."""
    references: dict[str, Output] = {}
    for protocol in [GRPC] * bool(load.grpc_share) + [HTTP] * bool(load.http_share):  # HTTP omits marks of reasoning
        asked = cases(load.kinds, load.max_tokens)
        log.info("generating %d reference outputs in sequence, without guesses (%s)", len(asked), protocol)
        client = _client(protocol, where, credentials, fleet.model)
        try:
            references |= {f"{protocol} {case.name}": fetch_reference(client, case) for case in asked}
        finally:
            client.close()
    log.info("%d reference outputs ready", len(references))
    return Assignment(where, load, fleet.model, references)


def _client(protocol: str, where: LoadTarget, credentials: ClientCredentials, model: str) -> LoadClient:
    if protocol == GRPC:
        return _grpc_client(where, credentials)
    return HttpLoadClient(random.choice(where.http), where.timeout_s, credentials, model)


def _grpc_client(where: LoadTarget, credentials: ClientCredentials) -> GrpcLoadClient:
    return GrpcLoadClient(where.grpc, where.timeout_s, credentials)


def _describe_over_http(where: LoadTarget, credentials: ClientCredentials, load: Load) -> tuple[str, int]:
    client = HttpLoadClient(where.http[0], where.timeout_s, credentials)
    try:
        return client.served_model(), client.capacity()
    except OutriderError as error:
        hint = "; --http-share 0 disables HTTP" if load.grpc_share else ""
        raise Unavailable(f"HTTP at {where.http[0]}: {error.message}{hint}") from error
    finally:
        client.close()
