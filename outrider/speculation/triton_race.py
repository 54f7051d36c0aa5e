"""The coupled draw over the whole vocabulary on a CUDA device: one pass over the logits, no softmax, no sort.

Triton is imported at the first draw. It comes with torch's CUDA builds; the kernel also runs in Triton's interpreter
(`TRITON_INTERPRET=1`), which is how it is tested without a device.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

PARTS = 8  # of a row, for programs side by side


@functools.cache
def _kernels() -> Any:
    """Import the kernel. The module needs Triton at import."""
    return importlib.import_module("outrider.speculation.triton_kernels")


def race(logits: torch.Tensor, states: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return the winner of each row's race; `states` are the rows' keys as int64.  # [rows, vocab] → [rows]"""
    rows = len(logits)
    least = torch.empty(rows, PARTS, dtype=torch.float64, device=logits.device)
    winners = torch.empty(rows, PARTS, dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call] # Triton launches on the current device
        _kernels().run_race(logits, states, temperature, least, winners)
    return winners.gather(1, least.argmin(dim=1, keepdim=True))[:, 0]
