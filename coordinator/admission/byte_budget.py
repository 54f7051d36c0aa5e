"""Byte budget: limit of the memory for requests that are being read, over HTTP and gRPC together."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from outrider.protocol.errors import InvalidRequest, Overloaded

UNCOUNTED = 64 * 1024  # bytes of a request outside the budget: small requests are always read
TRIM_AFTER_S = 1.0  # gRPC frees what it has received of a message only some time after its call has ended


@dataclass(slots=True)
class ByteShare:
    """Counted bytes of one request."""

    held: int = 0


class ByteBudget:
    """Budget of all requests. A request takes its share while it is read and returns it when its session starts."""

    def __init__(self, limit: int, counted: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Make a budget of `limit` bytes; Overloaded is raised in a block of `counted`."""
        self.limit = limit
        self._counted = counted
        self._held = 0
        self._trimming: asyncio.TimerHandle | None = None
        self._trim_again = False  # more was freed since that timer was set

    @contextmanager
    def share(self) -> Iterator[ByteShare]:
        share = ByteShare()
        try:
            yield share
        finally:
            self.give_back(share)

    def take(self, share: ByteShare, size: int) -> None:
        """Count a request of this size, as far as is known; raise Overloaded beyond the limit."""
        more = max(0, size - UNCOUNTED) - share.held
        if self._held + more > self.limit:
            self._trim_later()  # part of the request is in memory
            if more + share.held > self.limit:
                raise InvalidRequest.of("request", f"over {self.limit} bytes", f"at most {self.limit} bytes")
            message = f"requests of {self._held} bytes are being read already"
            limit = f"{self.limit} bytes of all requests together"
            with self._counted():
                raise Overloaded(message, field="request", value=size, limit=limit, retry_after_ms=1000)
        share.held += more
        self._held += more

    def give_back(self, share: ByteShare) -> None:
        self._held -= share.held
        if share.held and not self._held:
            self._trim_later()
        share.held = 0

    def _trim_later(self) -> None:
        self._trim_again = self._trimming is not None
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        trim()
        if self._trim_again:
            self._trim_later()


def trim() -> None:
    """Return freed memory to the system, which glibc would keep."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
