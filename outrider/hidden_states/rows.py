"""Rows of hidden states as they are sent: float16, or float8 with an exponent of its own for each position."""

from __future__ import annotations

import torch

from outrider.protocol.hidden_states.messages import HiddenStates

_BIAS = 127  # of the exponent byte
_LARGEST = torch.finfo(torch.float16).max


def encode(states: torch.Tensor, *, float8: bool = False) -> torch.Tensor:
    """Return rows on the CPU: float16 values, or bytes with the exponent first.  # [tokens, width] or [.., 1 + width]

    Values beyond float16 are cut to its largest: one infinity would spoil everything that a drafter computes.
    """
    if not float8:
        return states.clamp(-_LARGEST, _LARGEST).to(torch.float16).cpu()
    states = states.float()
    largest = states.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    # The largest value of a row comes to lie in (224, 448], the top of E4M3.
    exponents = torch.ceil(torch.log2(largest / torch.finfo(torch.float8_e4m3fn).max)).clamp(-_BIAS, _BIAS)
    values = (states / torch.exp2(exponents)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([(exponents + _BIAS).to(torch.uint8), values], dim=-1).cpu()


def decode(states: HiddenStates) -> torch.Tensor:
    """Return the values of received hidden states as float32.  # [tokens, width]"""
    if not states.rows:
        return torch.empty(0, states.width)
    if not states.float8:
        return torch.frombuffer(bytearray(states.rows), dtype=torch.float16).view(-1, states.width).float()
    rows = torch.frombuffer(bytearray(states.rows), dtype=torch.uint8).view(-1, 1 + states.width)
    scales = torch.exp2(rows[:, :1].float() - _BIAS)
    return rows[:, 1:].contiguous().view(torch.float8_e4m3fn).float() * scales
