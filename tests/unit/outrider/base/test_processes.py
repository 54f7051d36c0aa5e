"""Signals that end processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from outrider.base.processes import end_on_signals

# A process that is orphaned between its start and the call, and one whose parent dies after it; both then say "alive".
ORPHANS = """
import os, signal, sys, time
from outrider.base.processes import ending_with_parent
if os.fork() == 0:
    parent, end_with_parent = os.getpid(), ending_with_parent(signal.SIGKILL)
    if os.fork() == 0:
        if sys.argv[1] == "after":
            end_with_parent()
        while os.getppid() == parent:
            time.sleep(0.01)
        if sys.argv[1] == "before":
            end_with_parent()
        print("alive")
    elif sys.argv[1] == "after":
        time.sleep(1.0)
else:
    os.wait()
"""


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("death", ["before", "after"])
def test_a_child_ends_whenever_its_parent_dies(death: str) -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANS, death], stdout=subprocess.PIPE, timeout=30, check=True)
    assert done.stdout == b""
