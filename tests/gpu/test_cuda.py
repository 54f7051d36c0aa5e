"""What must hold on a CUDA device: the noise is the same, and the engine answers what it answers on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import noise
from outrider.drawing import shared_draw
from outrider.engine import Rows
from outrider.engine.load import load_model
from outrider.messages import SamplingParams
from tests.tiny import make_model

pytestmark = pytest.mark.gpu

PROMPT = list(range(40, 72))


def test_noise_has_the_same_bits_as_on_the_cpu() -> None:
    ids = torch.arange(100_000)
    keys = torch.tensor([[key - (1 << 63)] for key in (noise.key(7, noise.Use.COUPLED, p) >> 1 for p in range(4))])
    here = noise.exponentials(keys, ids)
    there = noise.exponentials(keys.cuda(), ids.cuda()).cpu()
    assert torch.allclose(here, there, rtol=1e-14, atol=0)
    assert torch.equal(here.argmin(dim=-1), there.argmin(dim=-1))


def test_engine_answers_as_on_the_cpu(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    cpu = load_model(str(folder), device="cpu", dtype="float32").engine
    gpu = load_model(str(folder), device="cuda", dtype="float32").engine
    tree = Rows("s", [5, 6, 7, 8], (-1, 0, 0, 2))
    for rows in (Rows("s", PROMPT), tree):
        here, there = cpu.extend([rows]).logits[0], gpu.extend([rows]).logits[0].cpu()
        assert torch.allclose(here, there, rtol=1e-3, atol=1e-3)


def test_draws_on_the_device(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    engine = load_model(str(folder), device="cuda", dtype="float32").engine
    logits = engine.extend([Rows("s", PROMPT)]).logits[0]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    positions = list(range(1, len(PROMPT) + 1))
    assert shared_draw(logits, params, positions) == shared_draw(logits.cpu(), params, positions)
