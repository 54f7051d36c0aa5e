"""Channels to other services."""

from __future__ import annotations

import gc
import weakref

from outrider.security.channels import Channels


def test_a_channel_that_nobody_holds_is_freed_at_once() -> None:
    """Its connections end with it. A cycle of references would keep them until a collection of garbage."""
    gc.disable()
    try:
        channel = Channels(key="key of a client").channel("127.0.0.1:1")
        dropped = weakref.ref(channel)
        del channel
        assert dropped() is None
    finally:
        gc.enable()
