"""`outrider doctor` names a GPU that cannot be used, and counts the memory that a start can have."""

from __future__ import annotations

import os

import pytest
import torch
from typer.testing import CliRunner

from outrider.cli import doctor
from outrider.cli.app import app


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


def test_memory_that_caches_files_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has read many files has hardly any free memory, and is well."""
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_AVPHYS_PAGES" else 4096)
    found = next(finding for finding in doctor._memory() if finding.name == "memory")
    assert not found.text.startswith("0.0 GiB")


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_cannot_be_is_not_in_use(port: str) -> None:
    result = CliRunner().invoke(app, ["doctor", f"--port={port}"])
    assert (result.exit_code, "Invalid value for '--port'" in result.output) == (2, True)
