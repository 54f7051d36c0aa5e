"""Processes: the signals that end them, and how often they collect garbage."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def ending_with_parent(by: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Return what a child calls to get a signal from the kernel when this process dies in whatever way; Linux only."""
    parent = os.getpid()

    def end_with_parent() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, by)
            if os.getppid() != parent:  # it died first
                os.kill(os.getpid(), by)

    return end_with_parent


def end_on_signals() -> None:
    """End this process on SIGTERM and SIGHUP as on Ctrl-C: with KeyboardInterrupt.

    A shell without job control starts background jobs with SIGINT ignored, and Python keeps that; scripts that send
    SIGINT expect a stop. A SIGHUP that `nohup` ignores stays ignored.
    """
    ending = False

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        # A closing terminal sends SIGHUP twice; a second Ctrl-C stops at once.
        if not ending or number == signal.SIGINT:
            ending = True
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


def collect_rarely() -> None:
    """Leave what there is out of garbage collections, and make them rare: they took a tenth of a coordinator's time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
