"""Unit tests run without Triton: what its kernels compute is computed by torch."""

from __future__ import annotations

import pytest

from outrider.engine.cuda import decoder
from tests.emulated_cuda import KernelsInTorch


@pytest.fixture(autouse=True)
def kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels of the CUDA engine."""
    monkeypatch.setattr(decoder, "_kernels", lambda: KernelsInTorch)
