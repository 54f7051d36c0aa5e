"""Worker channel: the gRPC channel to one worker, opened anew when keys or certificates change."""

from __future__ import annotations

from collections.abc import Callable, Collection

import grpc

from outrider.base.grpc_options import MAX_MESSAGE_BYTES
from outrider.protocol.fleet import Role, WorkerInfo
from outrider.protocol.message_limits import MAX_DRAFTER_MESSAGE_BYTES
from outrider.security.channels import Channels


class WorkerChannel:
    """Channel for new calls to a worker. Open streams stay on the channel that they started on."""

    def __init__(self, info: WorkerInfo, access: Callable[[], Channels], streams: Collection[object]) -> None:
        """Open the channel; `access` returns the present credentials, `streams` are those in progress."""
        self._address = info.address
        # Drafters send small messages and are not trusted: gRPC drops larger ones before they are read.
        self.max_bytes = MAX_DRAFTER_MESSAGE_BYTES if info.role is Role.DRAFTER else MAX_MESSAGE_BYTES
        self._access = access
        self._streams = streams
        self._opened_with = access()
        self._channel = self._opened_with.aio_channel(self._address, self.max_bytes)
        self._old: list[tuple[grpc.aio.Channel, set[object]]] = []  # with the streams that may still use them

    def current(self) -> grpc.aio.Channel:
        """Return a channel with the present key and certificate."""
        if (access := self._access()) != self._opened_with:
            self._old.append((self._channel, set(self._streams)))
            self._opened_with = access
            self._channel = access.aio_channel(self._address, self.max_bytes)
        return self._channel

    async def close_unused(self) -> None:
        """Close the old channels whose streams have all ended."""
        for channel, carried in self._old[:]:
            if carried.isdisjoint(self._streams):
                self._old.remove((channel, carried))
                await channel.close()

    async def close(self) -> None:
        for channel in (self._channel, *(old for old, _ in self._old)):
            await channel.close()
