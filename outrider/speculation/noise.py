"""Shared randomness: a number for (seed, use, position, id) that is the same on every machine.

It is a counter-based 64-bit hash in integer arithmetic. CPU and GPU agree bit
for bit, and no generator state has to be synchronised. `Use` separates draws
that must be independent: coupled noise shared between drafter and target
under the rejection rule would bias the text.
"""

from __future__ import annotations

import enum

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_POSITION = 0xD6E8FEB86659FD93
_BLOCK = 0xA0761D6478BD642F
_ID = 0xE7037ED1A0B428DB
_MANY_IDS = 4096  # above this, most ids are excluded in single precision first
_HEAVIEST = 32
_PART = 32_768  # torch runs larger operations on several threads, whose synchronisation costs more than it saves
_SLACK = 1.0 + 1e-5
_LARGEST = (1 << 53) - 2  # one more would round up to 1, whose logarithm is infinite


class Use(enum.IntEnum):
    """The purpose of a random number."""

    COUPLED = 1  # the draw that drafter and target share
    DRAFT = 2  # the drafter's own draw under rejection and block
    ACCEPT = 3  # the verifier's acceptance of a guess
    FINAL = 4  # recovered, bonus and plain tokens under rejection and block


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift logically; torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


def key(seed: int, use: Use, position: int, block: int = 0) -> int:
    """Return the hash state before ids are mixed in. `block` separates draws for one position in different steps."""
    state = _mix((seed + _GOLDEN * int(use)) & _MASK)
    return _mix((state + _POSITION * (position + 1) + _BLOCK * block) & _MASK)


def uniform(seed: int, use: Use, position: int, block: int = 0) -> float:
    """Return a uniform number in (0, 1)."""
    bits = min(_mix((key(seed, use, position, block) + _ID) & _MASK) >> 11, _LARGEST)
    return (bits + 0.5) * 2.0**-53


def exponentials(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return exponential noise of rate 1 in double precision for int64 `keys` and `ids`, which broadcast.

    It uses 53 random bits and log1p. With fewer bits, or in single precision,
    ids of small probability would never be drawn.
    """
    bits = _shift(_mix_tensor(keys + (ids + 1) * _signed(_ID)), 11).clamp_(max=_LARGEST)
    return -torch.log1p(-(bits.to(torch.float64) + 0.5) * 2.0**-53)


def exponential_race(keys: list[int], ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Draw a column from each row of `weights` [rows, ids]: the argmin of exponential noise divided by weight.

    `ids` is [ids] or [rows, ids]; entries of weight 0 are never drawn.
    P(i) = weight_i / Σ weights, so rows need no normalising.
    """
    if ids.dim() == 1 and len(ids) > _MANY_IDS:
        states = _states(keys, weights.device)
        return torch.stack([_long_race(state, ids, row) for state, row in zip(states, weights, strict=True)])
    return arrival_times(keys, ids, weights).argmin(dim=-1)


def arrival_times(keys: list[int], ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return exponential noise divided by weight; infinite for weight 0.  # [rows, ids]"""
    return exponentials(_states(keys, weights.device)[:, None], ids.to(torch.int64)) / weights.to(torch.float64)


def _states(keys: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=device)


def _long_race(state: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Draw from one long row: the same winner, with logarithms only for ids that can win.

    The heaviest ids give an upper bound of the minimum. An exponential is never
    below the uniform number u that it is computed from, so an id with u above
    bound · weight cannot win. Single precision, with some slack, shows that.
    """
    heaviest = weights.topk(_HEAVIEST).indices
    minimum = (exponentials(state, ids[heaviest]) / weights[heaviest].to(torch.float64)).min()
    bound = (minimum * _SLACK).to(torch.float32)
    left = torch.cat([_possible_winners(state, ids, weights, bound, start) for start in range(0, len(ids), _PART)])
    times = exponentials(state, ids[left]) / weights[left].to(torch.float64)
    return left[times.argmin()]


def _possible_winners(
    state: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bound: torch.Tensor, start: int
) -> torch.Tensor:
    here = slice(start, start + _PART)
    u = _shift(_mix_tensor(state + (ids[here] + 1) * _signed(_ID)), 40).to(torch.float32) * 2.0**-24
    return (u <= weights[here].to(torch.float32) * bound).nonzero()[:, 0] + start
