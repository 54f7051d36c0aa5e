"""Triton kernels. Import this module only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from outrider.speculation import noise

_BLOCK = 1024
_WARPS = 4
_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit  # type: ignore[untyped-decorator]
def _logical_shift(x, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _race(  # type: ignore[no-untyped-def]
    logits, states, temperatures, least, winners, vocab, stride, id_factor, mix_1, mix_2, largest,
    parts: tl.constexpr, block: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    """Compute argmin of log(exponential) − logit / T over one part of a row's ids; equals go to the lowest id."""
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(states + row)
    temperature = tl.load(temperatures + row)
    size = tl.cdiv(tl.cdiv(vocab, parts), block) * block
    best = tl.full((block,), float("inf"), tl.float64)
    best_id = tl.zeros((block,), tl.int32)
    for start in range(part * size, tl.minimum((part + 1) * size, vocab), block):
        ids = start + tl.arange(0, block)
        inside = ids < vocab
        logit = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf")).to(tl.float64)
        x = state + (ids.to(tl.int64) + 1) * id_factor
        x = (x ^ _logical_shift(x, 30)) * mix_1
        x = (x ^ _logical_shift(x, 27)) * mix_2
        x = x ^ _logical_shift(x, 31)
        u = (tl.minimum(_logical_shift(x, 11), largest).to(tl.float64) + 0.5) * 1.1102230246251565e-16
        if interpreted:  # the interpreter has no log1p
            exponential = tl.where(u < 1e-5, u + u * u * 0.5 + u * u * u / 3.0, -tl.log(1.0 - u))
        else:
            exponential = -libdevice.log1p(-u)
        time = tl.log(exponential) - logit / temperature
        time = tl.where(inside & (logit > float("-inf")), time, float("inf"))
        sooner = time < best
        best = tl.where(sooner, time, best)
        best_id = tl.where(sooner, ids, best_id)
    minimum = tl.min(best, 0)
    winner = tl.min(tl.where(best == minimum, best_id, 2147483647), 0)
    tl.store(least + row * parts + part, minimum)
    tl.store(winners + row * parts + part, tl.where(minimum < float("inf"), winner, 0).to(tl.int64))


def run_race(
    logits: torch.Tensor, states: torch.Tensor, temperature: torch.Tensor, least: torch.Tensor, winners: torch.Tensor
) -> None:
    """Write the least time and the winner of each row's parts.  # least, winners: [rows, parts]"""
    rows, parts = least.shape
    _race[(rows, parts)](
        logits,
        states,
        temperature,
        least,
        winners,
        logits.shape[1],
        logits.stride(0),
        *noise.HASH_FACTORS,
        noise.LARGEST,
        parts=parts,
        block=_BLOCK,
        interpreted=_INTERPRETED,
        num_warps=_WARPS,
    )
