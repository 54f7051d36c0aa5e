"""Which keys open which service of a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health

from outrider.security.api_keys import ApiKeys, bearer
from outrider.security.auth_interceptor import AuthInterceptor

VERIFIER = AuthInterceptor({"Verifier": ApiKeys(["fleet"])})
BOTH = VERIFIER.joined(AuthInterceptor({"Drafter": ApiKeys(["drafter"])}))
COORDINATOR = AuthInterceptor({"Coordinator": ApiKeys(["client"]), "Registry": ApiKeys(["fleet"])})


async def opens(interceptor: AuthInterceptor, service: str, key: str) -> bool:
    async def answer(details: Any) -> str:
        return "answered"

    shown = (("authorization", bearer(key)),) if key else ()
    call = SimpleNamespace(method=f"/{service}/Call", invocation_metadata=shown)
    return await interceptor.intercept_service(answer, cast(grpc.HandlerCallDetails, call)) == "answered"


@pytest.mark.parametrize(
    ("interceptor", "service", "keys"),
    [
        (VERIFIER, "Verifier", {"fleet"}),
        (COORDINATOR, "Coordinator", {"client"}),
        (COORDINATOR, "Registry", {"fleet"}),
        (COORDINATOR, "an unlisted service", {"client", "fleet"}),
        (COORDINATOR, health.SERVICE_NAME, {"", "client", "drafter", "fleet", "wrong"}),
        (BOTH, "Verifier", {"fleet"}),
        (BOTH, "Drafter", {"drafter"}),
        (BOTH, "an unlisted service", {"fleet", "drafter"}),
    ],
)
async def test_a_service_opens_to_its_own_keys(interceptor: AuthInterceptor, service: str, keys: set[str]) -> None:
    found = {key for key in ("", "client", "drafter", "fleet", "wrong") if await opens(interceptor, service, key)}
    assert found == keys
