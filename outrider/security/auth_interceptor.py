"""Who may call what: the gRPC interceptor that asks for keys, the same in all three services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health

from outrider.protocol.errors import Unauthenticated
from outrider.security.api_keys import HEADER, ApiKeys
from outrider.security.error_interceptor import abort
from outrider.security.tenants import act_for

log = structlog.get_logger(__name__)


# A caller that is still writing when its call ends may see INTERNAL instead of the reason (grpc issue 36066).
# Nothing that a stranger says is read, so it gets this long to finish a short message into the connection's buffer.
REFUSAL_S = 0.02


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """`doors`: the keys of each service by its full name.

    Health is open to all, for probes. What has no door of its own, such as
    reflection, opens to `others`, by default any of the keys: a service that
    somebody adds and forgets here is closed.
    """

    def __init__(self, doors: Mapping[str, ApiKeys], others: ApiKeys | None = None) -> None:
        self._doors = dict(doors) | {health.SERVICE_NAME: ApiKeys()}
        self._others = reduce(or_, doors.values(), ApiKeys()) if others is None else others
        # For calls of every kind: a stream's handler runs before gRPC reads the first message, a unary one's after.
        self._refused: Any = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method: str = handler_call_details.method
        keys = self._doors.get(method.strip("/").partition("/")[0], self._others)
        shown = dict(handler_call_details.invocation_metadata or ())
        holder = keys.holder(shown.get(HEADER))
        if holder is not None:
            act_for(holder)
            return await continuation(handler_call_details)
        return self._refused

    async def _refuse(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        log.debug("call without a valid key", peer=context.peer())
        await asyncio.sleep(REFUSAL_S)
        await abort(
            context,
            Unauthenticated(
                f"a valid key is needed here, sent as '{HEADER}: Bearer KEY'",
                field=HEADER,
                limit="Bearer and a valid key",
            ),
        )
