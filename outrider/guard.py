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

from outrider.errors import Unauthenticated
from outrider.keys import HEADER, Keys
from outrider.serving import abort
from outrider.tenants import act_for

log = structlog.get_logger(__name__)


# A caller that is refused while it still writes may get INTERNAL instead of the reason (grpc issue 36066): its first
# message is heard out, of not too many at once and not for long, for they are strangers.
HEAR_S = 1.0
MAX_HEARD = 16


class Guard(grpc.aio.ServerInterceptor):
    """`doors`: the keys of each service by its full name.

    Health is open to all, for probes. What has no door of its own, such as
    reflection, opens to any of the keys: a service that somebody adds and
    forgets here is closed.
    """

    def __init__(self, doors: Mapping[str, Keys]) -> None:
        self._doors = dict(doors) | {health.SERVICE_NAME: Keys()}
        self._others = reduce(or_, doors.values(), Keys())
        self._heard = 0
        # For calls of every kind: it may answer before it has read anything.
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
        if self._heard < MAX_HEARD:
            self._heard += 1
            try:
                async with asyncio.timeout(HEAR_S):
                    await anext(requests, None)
            except TimeoutError:
                log.debug("and without a word", peer=context.peer())
            finally:
                self._heard -= 1
        await abort(
            context,
            Unauthenticated(
                f"a valid key is needed here, sent as '{HEADER}: Bearer KEY'",
                field=HEADER,
                limit="Bearer and a valid key",
            ),
        )
