"""The synchronous client where no service is needed."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from grpc import _channel

from outrider.client.aio import AsyncClient
from outrider.client.sync import Client
from outrider.protocol.errors import InvalidRequest, OutriderError

_CLOSES_S = 20.0


def test_ctrl_c_while_a_call_begins_does_not_keep_the_client_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted call stayed in gRPC's channel, which waits for its calls when it is closed or deleted."""
    begin = _channel._run_channel_spin_thread
    began = threading.Event()

    def interrupted(state: Any) -> None:
        began.set()
        signal.raise_signal(signal.SIGINT)
        begin(state)

    monkeypatch.setattr(_channel, "_run_channel_spin_thread", interrupted)
    client = Client(["127.0.0.1:1"])
    with pytest.raises(KeyboardInterrupt):
        next(client.generate("One"))
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(_CLOSES_S)
    assert began.is_set()
    assert not closing.is_alive()


def test_a_closed_client_raises_and_ends_no_process() -> None:
    client = Client(["127.0.0.1:1"])
    client.close()
    with pytest.raises((ValueError, OutriderError)):
        client.server()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_one_endpoint_is_a_text_and_none_is_told(kind: Any) -> None:
    one, two = kind("127.0.0.1:1"), kind(["127.0.0.1:1", "127.0.0.1:2"])
    assert [made._endpoint_rotation._count for made in (one, two)] == [1, 2]
    for none in ([], "", ["127.0.0.1:1", ""]):
        with pytest.raises(InvalidRequest, match=r"endpoints is .*, must be one address HOST:PORT or several"):
            kind(none)
