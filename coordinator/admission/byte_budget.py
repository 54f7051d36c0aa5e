"""Byte budget: limit of the memory for requests that are being read, over HTTP and gRPC together."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.protocol.errors import Overloaded

UNCOUNTED = 64 * 1024  # bytes of a request outside the budget: small requests are always read


@dataclass(slots=True)
class ByteShare:
    """Counted bytes of one request."""

    held: int = 0


class ByteBudget:
    """Budget of all requests. A request takes its share while it is read and returns it when its session starts."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0

    @contextlib.contextmanager
    def share(self) -> Iterator[ByteShare]:
        share = ByteShare()
        try:
            yield share
        finally:
            self.give_back(share)

    def take(self, share: ByteShare, size: int) -> None:
        """Count a request of this size so far; raise Overloaded beyond the limit."""
        more = max(0, size - UNCOUNTED) - share.held
        if more <= 0:
            return
        if self._held + more > self.limit:
            raise Overloaded(
                f"requests of {self._held} bytes are being read already",
                field="request",
                value=size,
                limit=f"{self.limit} bytes of all requests together",
                retry_after_ms=1000,
            )
        share.held += more
        self._held += more

    def give_back(self, share: ByteShare) -> None:
        self._held -= share.held
        if share.held and not self._held:
            asyncio.get_running_loop().call_soon(_trim)  # after the bytes were freed
        share.held = 0


def _trim() -> None:
    """Return freed memory to the system, which glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
