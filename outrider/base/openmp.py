"""OpenMP settings: how long the threads of a model spin before they sleep.

GNU OpenMP lets them spin for milliseconds. That is fastest as long as every thread has a free core. With one other busy
process, each of the hundreds of parallel regions of a step waits for a whole time slice, and a step of 20 ms takes 200.
Spinning for microseconds avoids this and costs nothing measurable on a free machine. Where a process has more OpenMP
threads than cores, they sleep between the parts of a step, which then takes half as long again.
"""

from __future__ import annotations

import ctypes
import os

_SPINS = "2000"
_PAUSE_HARD = 2


def wait_briefly() -> None:
    """Shorten the spinning. Call it before torch is imported. A user setting wins."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def use_threads(count: int) -> None:
    """Set the number of threads of a model; 0: torch's default."""
    if count:
        import torch  # not at import time: `wait_briefly` must run first

        torch.set_num_threads(count)


def release_threads() -> None:
    """End the calling thread's OpenMP threads; OpenMP creates them again when needed."""
    _call("omp_pause_resource_all", _PAUSE_HARD)


def compute_alone() -> None:
    """Let the calling thread have no OpenMP threads beside the model's. torch's setting would hold for these too."""
    _call("omp_set_num_threads", 1)


def _call(function: str, argument: int) -> None:
    if (found := getattr(ctypes.CDLL(None), function, None)) is not None:  # torch has loaded OpenMP
        found(argument)
