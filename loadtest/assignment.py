"""What the users of a run are told: where to ask, what, and which answers are right.

Made by the process that leads, and sent to its workers.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any

from loadtest.asking import GRPC, HTTP, Asker, OverGrpc, OverHttp
from loadtest.attempt import fetch
from loadtest.credentials import ClientCredentials
from loadtest.settings import Load, LoadTarget
from loadtest.workload import Output, cases
from outrider.protocol.errors import OutriderError, Unavailable
from outrider.protocol.fleet import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """What it says of itself."""

    target: str
    model: str  # the same, as /v1/models calls it
    capacity: int  # sessions it takes at once


@dataclass(frozen=True, slots=True)
class Assignment:
    where: LoadTarget
    load: Load
    model: str
    answers: dict[str, Output]

    def asker(self, protocol: str, shown: ClientCredentials) -> Asker:
        return _asker(protocol, self.where, shown, self.model)

    def packed(self) -> dict[str, Any]:
        answers = {name: [output.text, output.token_ids, output.num_tokens] for name, output in self.answers.items()}
        return {"where": self.where.packed(), "load": self.load.packed(), "model": self.model, "answers": answers}

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Assignment:
        answers = {
            name: Output(text, None if ids is None else tuple(ids), num_tokens)
            for name, (text, ids, num_tokens) in data["answers"].items()
        }
        return cls(LoadTarget.unpacked(data["where"]), Load(**data["load"]), data["model"], answers)


def look(where: LoadTarget, shown: ClientCredentials, load: Load) -> ServedTarget:
    """Asks the fleet what it is, over all that the load will use. Raises when that does not work."""
    model, capacity = _over_http_told(where, shown, load) if load.http_share else ("", 0)
    if not load.grpc_share:
        return ServedTarget(model, model, where.capacity or capacity)
    with _over_grpc(where, shown).client as client:
        verifiers = [worker for worker in client.server().workers if worker.role is Role.VERIFIER]
        if not verifiers:
            raise Unavailable("the fleet has no verifier yet")
        return ServedTarget(client.model().name, model, where.capacity or sum(worker.capacity for worker in verifiers))


def assign(where: LoadTarget, shown: ClientCredentials, load: Load, fleet: ServedTarget) -> Assignment:
    """Asks for the answers. Raises when one does not come."""
    asked = cases(load.kinds, load.max_tokens)
    log.info("asking %d prompts one after the other, without guessing", len(asked))
    asker = _asker(GRPC if load.grpc_share else HTTP, where, shown, fleet.model)
    try:
        answers = {case.name: fetch(asker, case) for case in asked}
    finally:
        asker.close()
    log.info("%d answers known", len(answers))
    return Assignment(where, load, fleet.model, answers)


def _asker(protocol: str, where: LoadTarget, shown: ClientCredentials, model: str) -> Asker:
    if protocol == GRPC:
        return _over_grpc(where, shown)
    return OverHttp(random.choice(where.http), where.timeout_s, shown, model)


def _over_grpc(where: LoadTarget, shown: ClientCredentials) -> OverGrpc:
    return OverGrpc(where.grpc, where.timeout_s, shown)


def _over_http_told(where: LoadTarget, shown: ClientCredentials, load: Load) -> tuple[str, int]:
    over_http = OverHttp(where.http[0], where.timeout_s, shown)
    try:
        return over_http.served_model(), over_http.capacity()
    except OutriderError as error:
        hint = "; --http-share 0 leaves HTTP out" if load.grpc_share else ""
        raise Unavailable(f"HTTP at {where.http[0]}: {error.message}{hint}") from error
    finally:
        over_http.close()
