"""The keys of a coordinator and its workers: which of them opens what, and which is shown to whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import structlog

from outrider.protocol.errors import StartupError, Unauthenticated
from outrider.protocol.fleet import Role
from outrider.security.api_keys import HEADER, ApiKeys
from outrider.security.channels import Channels
from outrider.security.credentials import Credentials
from outrider.security.tls import Tls

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FleetKeys:
    """A drafter is shown the drafters' key only, and with it can register as a drafter only."""

    tls: Callable[[], Tls | None] = lambda: None
    verifiers: ApiKeys = field(default_factory=ApiKeys)
    drafters: ApiKeys = field(default_factory=ApiKeys)

    @classmethod
    def of(cls, credentials: Credentials) -> Self:
        """Raises StartupError where a door would stand open beside a closed one."""
        verifiers, drafters = credentials.keys("fleet_key"), credentials.keys("drafter_key")
        for name, keys in (("api_keys are", credentials.keys("api_keys")), ("drafter_key is", drafters)):
            if keys and not verifiers:
                raise StartupError(
                    f"{name} given without fleet_key: anybody could report as a worker and read what clients write; "
                    "give the same fleet_key to the coordinators and verifiers",
                    field="fleet_key",
                    limit="a secret",
                )
        if verifiers and not drafters:
            log.warning("no drafter_key: every drafter has the fleet key, with which it could pass for a verifier")
        elif verifiers.shares(drafters):
            log.warning("drafter_key and fleet_key have a key in common: who has it could pass for a verifier")
        return cls(lambda: credentials.tls, verifiers, drafters or verifiers)

    @property
    def door(self) -> ApiKeys:
        """Who may register at all."""
        return self.verifiers | self.drafters

    def keys(self, role: Role) -> ApiKeys:
        return self.drafters if role is Role.DRAFTER else self.verifiers

    def access(self, role: Role) -> Channels:
        """How workers of this role are called now."""
        return Channels(self.tls(), self.keys(role).first)

    def check(self, role: Role, header: str | bytes | None) -> None:
        """Raise Unauthenticated where the key that was shown is not for workers of this role."""
        if not self.keys(role).allows(header):
            name = "drafter_key" if role is Role.DRAFTER else "fleet_key"
            raise Unauthenticated(
                f"a {role.name.lower()} registers with the {name}, not with the key that was shown",
                field=HEADER,
                limit=f"the {name}",
            )
