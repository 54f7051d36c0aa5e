"""The coupled draw of a CUDA device is the CPU's: around its kernel, and in Triton's interpreter where Triton is."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation import noise, triton_race
from outrider.speculation.exponential_race import coupled_draws
from tests.emulated_cuda import race_in_parts

NONE_OF_THEM = 3  # a row that allows no id


interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton, and TRITON_INTERPRET=1 before its import (make vllm)",
)


def _rows(vocab: int) -> tuple[torch.Tensor, list[SamplingParams], list[int]]:
    """Return logits with equal ones, refused ids and a row without any, each row with its own temperature and seed."""
    logits = torch.randn(6, vocab + 5, generator=torch.Generator().manual_seed(vocab))[:, :vocab] * 4
    logits[1] = logits[1].round()
    logits[2, ::3] = float("-inf")
    logits[NONE_OF_THEM] = float("-inf")
    params = [SamplingParams(seed=2**64 - 1 - row, temperature=0.3 + 0.4 * row) for row in range(6)]
    return logits, params, [7 * row for row in range(6)]


def _race(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    keys = [noise.key(p.seed or 0, noise.Use.COUPLED, at) for p, at in zip(params, positions, strict=True)]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    drawn: list[int] = triton_race.race(logits, noise.signed(keys), temperature).tolist()
    return drawn


@pytest.mark.parametrize("vocab", [1, 40, 1024, 5000, 32_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_draw_is_the_cpus(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_race, "_kernels", lambda: SimpleNamespace(run_race=race_in_parts))
    logits, params, positions = _rows(vocab)
    wanted = coupled_draws(logits.to(dtype), params, positions).tolist()
    assert _race(logits.to(dtype), params, positions) == wanted


@interpreted
@pytest.mark.parametrize("vocab", [1, 40, 5000, 32_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_as_the_cpu(vocab: int, dtype: torch.dtype) -> None:
    logits, params, positions = _rows(vocab)
    wanted = coupled_draws(logits.to(dtype), params, positions).tolist()
    assert _race(logits.to(dtype), params, positions) == wanted


@interpreted
def test_the_kernel_computes_what_its_stand_in_does() -> None:
    """`tests.emulated_cuda` runs the stand-in."""
    logits, params, _ = _rows(20_000)
    states = noise.signed([noise.key(row, noise.Use.COUPLED, 5) for row in range(6)])
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    found, wanted = (
        (torch.full((6, 8), -1.0, dtype=torch.float64), torch.full((6, 8), -1, dtype=torch.int64)) for _ in range(2)
    )
    triton_race._kernels().run_race(logits, states, temperature, *found)
    race_in_parts(logits, states, temperature, *wanted)
    assert torch.allclose(found[0], wanted[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(found[1], wanted[1])


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton_the_draw_says_what_is_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match="triton"):
        _race(*_rows(40))
