"""The shared randomness: a number for (seed, use, position, id), the same on every machine.

A counter-based 64-bit hash in integer arithmetic, so CPU and GPU agree bit
for bit and nobody has to keep a generator's state in step. The `Use` keeps
draws that must be independent apart: sharing the coupled noise between
drafter and target under the rejection rule biases the text.
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
_MANY = 4096  # ids from which on most are ruled out before they are looked at closely
_HEAVY = 32
_PART = 32_768  # torch spreads larger operations over threads, and waiting for those costs more than they save
_SLACK = 1.0 + 1e-5
_LARGEST = (1 << 53) - 2  # one more would round up to 1, whose logarithm is infinite


class Use(enum.IntEnum):
    """What a random number is for."""

    COUPLED = 1  # the draw that drafter and target share
    DRAFT = 2  # the drafter's own draw under rejection and block
    ACCEPT = 3  # the verifier's yes or no to a guess
    FINAL = 4  # recovered, bonus and plain tokens under rejection and block


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


def key(seed: int, use: Use, position: int, block: int = 0) -> int:
    """The hash state before ids are mixed in. `block` tells apart draws made for one position in different steps."""
    state = _mix((seed + _GOLDEN * int(use)) & _MASK)
    return _mix((state + _POSITION * (position + 1) + _BLOCK * block) & _MASK)


def uniform(seed: int, use: Use, position: int, block: int = 0) -> float:
    """One number in (0, 1)."""
    bits = min(_mix((key(seed, use, position, block) + _ID) & _MASK) >> 11, _LARGEST)
    return (bits + 0.5) * 2.0**-53


def exponentials(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponential noise of rate 1 in double precision for int64 `keys` and `ids`, which broadcast.

    53 random bits and log1p: with fewer, or in single precision, ids of small
    probability would never be drawn.
    """
    bits = _shift(_mix_tensor(keys + (ids + 1) * _signed(_ID)), 11).clamp_(max=_LARGEST)
    return -torch.log1p(-(bits.to(torch.float64) + 0.5) * 2.0**-53)


def exponential_race(keys: list[int], ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Draw from each row of `weights` [rows, ids]: whoever's exponential clock rings first.

    `ids` is [ids] or [rows, ids]; entries of weight 0 never win. Returns column
    indices. P(i wins) = weight_i / Σ weights, so rows need no normalising.
    """
    if ids.dim() == 1 and len(ids) > _MANY:
        states = _states(keys, weights.device)
        return torch.stack([_long_race(state, ids, row) for state, row in zip(states, weights, strict=True)])
    return arrival_times(keys, ids, weights).argmin(dim=-1)


def arrival_times(keys: list[int], ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """When each clock of a race rings; never for weight 0.  # [rows, ids]"""
    return exponentials(_states(keys, weights.device)[:, None], ids.to(torch.int64)) / weights.to(torch.float64)


def _states(keys: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=device)


def _long_race(state: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One row of a race of many: the same winner, with logarithms only for those who may have won.

    The heaviest set a time to beat. A clock's exponential is never below the
    uniform number u that it is made from, so whoever has u above time · weight
    is too late; that much is seen in single precision, with some slack.
    """
    heavy = weights.topk(_HEAVY).indices
    to_beat = (exponentials(state, ids[heavy]) / weights[heavy].to(torch.float64)).min()
    bound = (to_beat * _SLACK).to(torch.float32)
    able = torch.cat([_able(state, ids, weights, bound, start) for start in range(0, len(ids), _PART)])
    arrivals = exponentials(state, ids[able]) / weights[able].to(torch.float64)
    return able[arrivals.argmin()]


def _able(
    state: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bound: torch.Tensor, start: int
) -> torch.Tensor:
    here = slice(start, start + _PART)
    u = _shift(_mix_tensor(state + (ids[here] + 1) * _signed(_ID)), 40).to(torch.float32) * 2.0**-24
    return (u <= weights[here].to(torch.float32) * bound).nonzero()[:, 0] + start
