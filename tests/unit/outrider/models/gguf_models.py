"""Small GGUF files, and how tests of this folder load them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.loading.options import EngineOptions
from tests import gguf_files
from tests.gguf_files import Shape, write_gguf

TOKENS = list(range(3, 60))
SMALL = Shape(hidden=256, inner=256, layers=1, heads=4, kv_heads=2, head_dim=64)


def options(**chosen: Any) -> EngineOptions:
    return EngineOptions(**({"device": "cpu", "dtype": "float32", "kv_tokens": 512, "threads": 1} | chosen))


def weights_of_transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def scaled_file(tmp_path: Path, architecture: str = "llama", **more: Any) -> Path:
    shape = (
        replace(SMALL, layers=6) if architecture == "gemma3" else SMALL
    )  # the first with full attention is the sixth
    return write_gguf(tmp_path / "random.gguf", shape, lambda _: "Q8_0", architecture, **more)


def without(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files lack the tensors with this in their names."""
    whole = gguf_files._tensors
    left = lambda shape, kind: ((name, size) for name, size in whole(shape, kind) if part not in name)  # noqa: E731
    monkeypatch.setattr(gguf_files, "_tensors", left)
