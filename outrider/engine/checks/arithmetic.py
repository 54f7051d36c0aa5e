"""What a model's bits depend on besides the model: whose operations make them. Part of its fingerprint."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
import transformers

# Fingerprints are as in releases that did not know arithmetics, so that these may stand in for each other.
_USUAL = "native 1, torch's functions 3b448689c15b5de5"


def of_kernels(version: int) -> str:
    """Return the arithmetic of the CPU kernels: their own, and a few functions of torch's before and after them."""
    return f"native {version}, torch's functions {functions()}"


def of_torch(kind: str, device: torch.device) -> str:
    """Return the arithmetic of an engine whose products are torch's."""
    where = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{kind} on {where}, {libraries}, torch's functions {functions()}"


def signed(fingerprint: str, arithmetic: str) -> str:
    """Return a fingerprint of model and arithmetic together: equal ones mean equal bits."""
    if arithmetic == _USUAL:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} {arithmetic}".encode()).hexdigest()[:32]


@cache
def functions() -> str:
    """Return a digest of what torch's functions give here, for rotations (single precision) and sampling (double)."""
    points = (torch.arange(16_384) * 2_654_435_761 % 1_000_003).to(torch.float64) / 1_000_003
    angles = (points * 4096).float()
    found = [angles.cos(), angles.sin(), (points * -40).exp(), torch.log1p(-points), points.log1p()]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in found)).hexdigest()[:16]
