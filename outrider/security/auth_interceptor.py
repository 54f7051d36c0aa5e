"""gRPC interceptor that checks API keys, in all three services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import reduce
from operator import or_
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from outrider.base.aio import Call, Continuation
from outrider.protocol.errors import Unauthenticated
from outrider.security.api_keys import HEADER, ApiKeys
from outrider.security.error_interceptor import abort
from outrider.security.tenants import set_tenant

log = structlog.get_logger(__name__)

# A caller that is still writing when its call ends may get INTERNAL instead of the reason (grpc issue 36066).
# The request of a rejected call is not read: the delay lets a short message reach the connection's buffer.
REFUSAL_S = 0.02
REFLECTION = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")  # clients ask for v1 first


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Check of the API key of every call; `keys_by_service` has the keys of each service by its full name.

    Health needs no key, for probes. Services without an entry, such as reflection, require one of `others`, by default
    any of the keys: a service that is added and not listed stays closed.
    """

    def __init__(self, keys_by_service: Mapping[str, ApiKeys], others: ApiKeys | None = None) -> None:
        self._keys_by_service = dict(keys_by_service) | {health.SERVICE_NAME: ApiKeys()}
        self._others = reduce(or_, keys_by_service.values(), ApiKeys()) if others is None else others
        # One handler for calls of every kind: a stream's runs before gRPC reads the first message, a unary one's after.
        self._refused: Any = grpc.stream_stream_rpc_method_handler(self._refuse)

    def joined(self, other: AuthInterceptor) -> AuthInterceptor:
        """Return the check for both ones' services."""
        return AuthInterceptor(self._keys_by_service | other._keys_by_service)

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method: str = handler_call_details.method
        keys = self._keys_by_service.get(method.strip("/").partition("/")[0], self._others)
        holder = keys.tenant_of(dict(handler_call_details.invocation_metadata or ()).get(HEADER))
        if holder is not None:
            set_tenant(holder)
            return await continuation(handler_call_details)
        return self._refused

    async def _refuse(self, requests: AsyncIterator[bytes], context: Call) -> None:
        log.debug("call rejected: API key not accepted", peer=context.peer())
        await asyncio.sleep(REFUSAL_S)
        message = f"a valid key is needed here, sent as '{HEADER}: Bearer KEY'"
        await abort(context, Unauthenticated(message, field=HEADER, limit="Bearer and a valid key"))
