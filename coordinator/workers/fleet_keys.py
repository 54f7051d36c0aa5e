"""Fleet keys: credentials between a coordinator and its workers."""

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
    """Keys by role. A drafter receives only the drafter key, which allows only registration as a drafter."""

    tls: Callable[[], Tls | None] = lambda: None
    verifiers: ApiKeys = field(default_factory=ApiKeys)
    drafters: ApiKeys = field(default_factory=ApiKeys)

    @classmethod
    def of(cls, credentials: Credentials) -> Self:
        """Return the keys; raise StartupError for keys that protect only a part of the services."""
        verifiers, drafters = credentials.keys["fleet_key"], credentials.keys["drafter_key"]
        for name, keys in (("api_keys are", credentials.keys["api_keys"]), ("drafter_key is", drafters)):
            if keys and not verifiers:
                raise StartupError(
                    f"{name} given without fleet_key: any process could register as a worker and read "
                    "clients' prompts; give the same fleet_key to the coordinators and verifiers",
                    field="fleet_key",
                    limit="a secret",
                )
        if verifiers and not drafters:
            log.warning("no drafter_key: drafters use the fleet key, with which they could register as verifiers")
        elif verifiers.shares(drafters):
            log.warning("drafter_key and fleet_key share a key, with which drafters could register as verifiers")
        return cls(lambda: credentials.tls, verifiers, drafters or verifiers)

    def keys(self, role: Role) -> ApiKeys:
        return self.drafters if role is Role.DRAFTER else self.verifiers

    def access(self, role: Role) -> Channels:
        """Return the present channel credentials for workers of this role."""
        return Channels(self.tls(), self.keys(role).first)

    def check(self, role: Role, header: str | bytes | None) -> None:
        """Raise Unauthenticated unless the key of this header is one for the role."""
        if not self.keys(role).allows(header):
            name = "drafter_key" if role is Role.DRAFTER else "fleet_key"
            message = f"a {role.name.lower()} registers with the {name}, not with the key of this request"
            raise Unauthenticated(message, field=HEADER, limit=f"the {name}")
