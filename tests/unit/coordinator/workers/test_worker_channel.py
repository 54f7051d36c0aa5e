"""The channel to a worker: opened anew with new keys, closed once its streams have ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from coordinator.workers.worker_channel import WorkerChannel
from outrider.base.grpc_options import MAX_MESSAGE_BYTES
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.message_limits import MAX_DRAFTER_MESSAGE_BYTES
from outrider.security.channels import Channels


@dataclass
class Opened:
    closed: bool = False

    async def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Keyed:
    """Credentials that open channels of ours."""

    key: str
    opened: list[tuple[Opened, int]] = field(default_factory=list, compare=False)

    def aio_channel(self, address: str, receive_bytes: int) -> Opened:
        self.opened.append((Opened(), receive_bytes))
        return self.opened[-1][0]


@pytest.mark.parametrize(
    ("role", "most"), [(Role.DRAFTER, MAX_DRAFTER_MESSAGE_BYTES), (Role.VERIFIER, MAX_MESSAGE_BYTES)]
)
async def test_old_channels_are_closed_when_their_streams_have_ended(role: Role, most: int) -> None:
    keys, streams = [Keyed("old")], {object()}
    info = WorkerInfo("w", role, "127.0.0.1:1", ModelInfo("m", "f"))
    channel = WorkerChannel(info, lambda: cast(Channels, keys[-1]), streams)
    old: Any = channel.current()
    assert channel.current() is old
    keys.append(Keyed("new"))
    new: Any = channel.current()
    assert new is not old
    streams.add(object())  # on the new one
    await channel.close_unused()
    assert not old.closed
    streams.clear()
    await channel.close_unused()
    assert (old.closed, new.closed) == (True, False)
    assert [limit for each in keys for _, limit in each.opened] == [most] * 2
