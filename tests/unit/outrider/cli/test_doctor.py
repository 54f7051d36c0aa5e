"""`outrider doctor` names a GPU that cannot be used."""

from __future__ import annotations

import pytest
import torch

from outrider.cli import doctor


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", "bad"),
        ("No CUDA GPUs are available", "note"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_bad(monkeypatch: pytest.MonkeyPatch, reason: str, state: str) -> None:
    def init() -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    (found,) = [finding for finding in doctor._torch() if finding.name == "device"]
    assert found.state == state
    assert (reason in found.text) == (state == "bad")
