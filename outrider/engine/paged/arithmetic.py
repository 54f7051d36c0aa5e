"""Arithmetic of an engine: what decides the bits of its logits besides the model. It is part of the fingerprint."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
import transformers

USUAL_KERNELS = 1  # version of the CPU kernels
# This arithmetic leaves a fingerprint as it is: earlier releases, which had no other, stay compatible.
_USUAL = "native 1, torch's functions 3b448689c15b5de5"


def kernel_arithmetic(version: int, *parts: str) -> str:
    """Return the arithmetic of the CPU kernels with their number formats, and the torch functions around them."""
    return ", ".join([f"native {version}", *parts, f"torch's functions {torch_functions_digest()}"])


def torch_arithmetic(kind: str, device: torch.device) -> str:
    """Return the arithmetic of an engine whose products are torch's."""
    where = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{kind} on {where}, {libraries}, torch's functions {torch_functions_digest()}"


def combine(fingerprint: str, arithmetic: str) -> str:
    """Return a fingerprint of model and arithmetic together: equal ones mean equal bits."""
    if arithmetic == _USUAL:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} {arithmetic}".encode()).hexdigest()[:32]


@cache
def torch_functions_digest() -> str:
    """Return a digest of torch's functions on this machine, for rotations (single precision) and sampling (double)."""
    points = (torch.arange(16_384) * 2_654_435_761 % 1_000_003).to(torch.float64) / 1_000_003
    angles = (points * 4096).float()
    values = [angles.cos(), angles.sin(), (points * -40).exp(), torch.log1p(-points), points.log1p()]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in values)).hexdigest()[:16]
