"""Preparation of child processes."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send a signal to this new child when its parent dies, in whatever way. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, by)
