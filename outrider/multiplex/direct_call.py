"""Direct calls: sessions in a shared stream hand their messages over at once, without a task that has to wake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from outrider.base.aio import Call
from outrider.multiplex.stream import MultiplexedStream


@dataclass(frozen=True, slots=True)
class DirectCall:
    """Call of a session in a shared stream."""

    headers: tuple[tuple[str, str], ...]
    stream: MultiplexedStream
    decode: Callable[[bytes], Any]
    ready: Callable[[], bool]  # whether the peer reads fast enough for another reply
    readable: Callable[[], Awaitable[None]]  # waits until it does

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.headers

    def send(self, reply: Any) -> None:
        self.stream.send(reply.SerializeToString())

    async def requests(self) -> AsyncIterator[Any]:
        while (data := await self.stream.read()) is not None:
            yield self.decode(data)

    def deliver(self, take: Callable[[Any], None]) -> None:
        """Call `take` with each request as it comes, in this context. `requests` then raises its error, or ends."""
        context = copy_context()
        self.stream.deliver_to(lambda data: context.run(take, self.decode(data)))


Context = Call | DirectCall  # of a session's call: a gRPC stream of its own, or within a shared one
