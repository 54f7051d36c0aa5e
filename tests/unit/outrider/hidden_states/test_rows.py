"""Rows of hidden states: what arrives is what was sent, within the precision that was asked for."""

from __future__ import annotations

import pytest
import torch

from outrider.hidden_states.rows import decode, encode
from outrider.protocol.hidden_states.messages import HiddenStates

WIDTH = 64


def received(states: torch.Tensor, *, float8: bool) -> torch.Tensor:
    rows = encode(states, float8=float8).numpy().tobytes()
    sent = HiddenStates(0, WIDTH, rows, 1, float8)
    assert sent.count == len(states)
    assert len(rows) == len(states) * (WIDTH + 1 if float8 else 2 * WIDTH)
    return decode(sent)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4, 1e30])
def test_float8_keeps_three_bits_at_any_scale(scale: float) -> None:
    states = scale * torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(0))
    largest = states.abs().amax(dim=-1, keepdim=True)
    error = (received(states, float8=True) - states).abs()
    assert bool((error <= states.abs() / 16 + largest * 2.0**-15).all())


def test_float16_is_exact_for_what_float16_holds() -> None:
    states = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(received(states, float8=False), states.float())


@pytest.mark.parametrize("float8", [False, True])
def test_what_float16_does_not_hold_stays_finite(float8: bool) -> None:
    states = torch.zeros(2, WIDTH)
    states[0, 0], states[0, 1] = 1e6, -1e6
    got = received(states, float8=float8)
    assert bool(torch.isfinite(got).all())
    assert got[0, 0] >= 65504
    assert got[0, 1] <= -65504
    assert not got[1].any()


@pytest.mark.parametrize("float8", [False, True])
def test_no_rows(float8: bool) -> None:
    assert received(torch.empty(0, WIDTH), float8=float8).shape == (0, WIDTH)
