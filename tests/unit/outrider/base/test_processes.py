"""Signals that end processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from outrider.base.processes import end_on_signals


@pytest.fixture
def handlers() -> Iterator[Callable[[int], None]]:
    """Send a signal to ourselves; the handlers from before come back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield signal.raise_signal
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_ends_it_and_only_ctrl_c_hastens(handlers: Callable[[int], None], first: signal.Signals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell leaves it for what ends in &
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    end_on_signals()
    with pytest.raises(KeyboardInterrupt):
        handlers(first)
    handlers(signal.SIGTERM)
    handlers(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        handlers(signal.SIGINT)


def test_nohup_means_it(handlers: Callable[[int], None]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_on_signals()
    handlers(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        handlers(signal.SIGTERM)
