"""How long threads that share a model's work wait for each other before they sleep.

GNU OpenMP lets them spin for milliseconds. As long as every thread has a core
that is free, nothing is faster; but beside one other busy process each of the
hundreds of short parallel parts of a step then waits for a whole time slice,
and a step of 20 ms takes 200. A few microseconds cost nothing measurable when
the machine is free and cost only the fair share when it is not.
"""

from __future__ import annotations

import ctypes
import os

_SPINS = "2000"
_PAUSE_HARD = 2


def wait_briefly() -> None:
    """To be called before torch is loaded, which reads this once. A user's own setting holds."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def use_threads(count: int) -> None:
    """Set how many threads a model's work is shared among; 0 leaves it to torch."""
    if count:
        import torch  # here: `wait_briefly` comes before

        torch.set_num_threads(count)


def let_go() -> None:
    """End the threads that helped the calling thread so far; they come back when it next needs them.

    OpenMP counts all threads that were ever made. A model that one thread loaded and another runs would make more than
    there are cores, and they would then sleep and be woken between any two parts of a step: half as long again.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_PAUSE_HARD)
