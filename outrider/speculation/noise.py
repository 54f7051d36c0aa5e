"""Shared randomness: a number for (seed, use, position, id) that is the same on every machine.

It is a counter-based 64-bit hash in integer arithmetic. CPU and GPU agree bit for bit, and no generator state has to be
synchronised. `Use` separates draws that must be independent: coupled noise shared between drafter and target under the
rejection rule would bias the text.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_Hashes = npt.NDArray[np.uint64]
Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of `pruned_race`

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_POSITION = 0xD6E8FEB86659FD93
_BLOCK = 0xA0761D6478BD642F
_ID = 0xE7037ED1A0B428DB
MANY_IDS = 4096  # above this, most ids are excluded by their hash first
BLOCK = 128
_HEAVIEST_BLOCKS = 8
_PART = 65_536  # numbers that two buffers of 8 bytes keep in a processor's cache
_TOP_BITS = 24
_LOW_BITS = np.uint64(64 - _TOP_BITS)
_LOW_MASK = np.uint64((1 << (64 - _TOP_BITS)) - 1)
_SLACK = 1.0 + 1e-9
LARGEST = (1 << 53) - 2  # one more would round up to 1, whose logarithm is infinite


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


HASH_FACTORS = tuple(_signed(factor) for factor in (_ID, _MIX_1, _MIX_2))  # as int64, for kernels


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
    bits = min(_mix((key(seed, use, position, block) + _ID) & _MASK) >> 11, LARGEST)
    return (bits + 0.5) * 2.0**-53


def exponentials(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return exponential noise of rate 1 in double precision for int64 `keys` and `ids`, which broadcast.

    It uses 53 random bits and log1p: with fewer, or in single precision, ids of small probability were never drawn.
    """
    return _of_bits(_shift(_mix_tensor(keys + (ids + 1) * _signed(_ID)), 11))


def _of_bits(bits: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(-(bits.clamp_(max=LARGEST).to(torch.float64) + 0.5) * 2.0**-53)


def exponential_race(keys: list[int], ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Draw a column from each row of `weights` [rows, ids]: the argmin of exponential noise divided by weight.

    `ids` is [rows, ids], or [ids] for all, in order; entries of weight 0 are never drawn.
    P(i) = weight_i / Σ weights, so rows need no normalising.
    """
    if ids.dim() == 1 and len(ids) > MANY_IDS and not weights.is_cuda:
        return pruned_race(signed(keys), weights, lambda values, _: values.to(torch.float64))
    return arrival_times(keys, ids, weights).argmin(dim=-1)


def arrival_times(keys: list[int], ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return exponential noise divided by weight; infinite for weight 0.  # [rows, ids]"""
    states = to_device(signed(keys), weights.device)
    return exponentials(states[:, None], ids.to(torch.int64)) / weights.to(torch.float64)


def signed(keys: list[int]) -> torch.Tensor:
    """Return keys as int64, bit for bit."""
    return torch.tensor([_signed(k) for k in keys], dtype=torch.int64)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values from the host without waiting for the device."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def block_peaks(values: torch.Tensor) -> torch.Tensor:
    """Return the maximum of each block of BLOCK neighbours, the last of which may be shorter.  # [rows, blocks]"""
    rows, width = values.shape
    whole = width // BLOCK
    peaks = values[:, : whole * BLOCK].view(rows, whole, BLOCK).amax(dim=-1)
    if whole * BLOCK == width:
        return peaks
    return torch.cat([peaks, values[:, whole * BLOCK :].amax(dim=-1, keepdim=True)], dim=1)


def pruned_race(states: torch.Tensor, values: torch.Tensor, weigh: Weigh) -> torch.Tensor:
    """Draw from rows of many ids on a CPU: the winner of all, with logarithms only for columns that can win.

    `weigh` returns the weights of some `values` [rows, ids] in double precision, given their rows: higher for higher.

    The columns of the heaviest blocks give an upper bound of the minimum. An exponential is never below the uniform
    number u that it is computed from, so a column with u above bound · weight cannot win. The weight is at most its
    block's peak, so one integer comparison per hash excludes nearly all. About BLOCK columns of a row are left,
    whatever the distribution. A row without a finite positive weight gives column 0.
    """
    num_ids = values.shape[-1]
    keys, mixed = states.numpy().view(np.uint64)[:, None], _mixed_ids(num_ids)
    rows = torch.arange(len(states))[:, None]
    peaks = weigh(block_peaks(values), rows)
    heaviest = peaks.topk(min(_HEAVIEST_BLOCKS, peaks.shape[1]), dim=-1).indices
    heavy = (heaviest[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1).clamp_(max=num_ids - 1)
    first = (_exponentials(keys, mixed[heavy.numpy()]) / weigh(values[rows, heavy], rows)).min(dim=-1, keepdim=True)
    bounds = (peaks * first.values * (_SLACK * 2.0**_TOP_BITS)).ceil_().nan_to_num_(nan=0.0)
    limits = bounds.clamp_(max=2.0**_TOP_BITS - 1).to(torch.int64).numpy().astype(np.uint64)
    row, column = _possible_winners(keys, mixed, (limits << _LOW_BITS) | _LOW_MASK, heavy.gather(1, first.indices))
    left = torch.from_numpy(row)
    times = _exponentials(keys[row, 0], mixed[column]) / weigh(values[left, torch.from_numpy(column)], left)
    return _first_of_least(row, column, times.numpy(), len(states))


@lru_cache(maxsize=4)
def _mixed_ids(num_ids: int) -> _Hashes:
    """Return the part of the hash that an id has, of all ids; zeros fill the last block."""
    mixed = np.zeros(-(-num_ids // BLOCK) * BLOCK, dtype=np.uint64)
    mixed[:num_ids] = np.arange(1, num_ids + 1, dtype=np.uint64) * np.uint64(_ID)
    return mixed


def _exponentials(keys: _Hashes, mixed: _Hashes) -> torch.Tensor:
    """Return the noise that `exponentials` returns, with fewer operations."""
    x, shifted = np.empty((2, *np.broadcast_shapes(keys.shape, mixed.shape)), dtype=np.uint64)
    _hash_top_bits(keys, mixed, x, shifted)
    return _of_bits(torch.from_numpy(((x ^ (x >> np.uint64(31))) >> np.uint64(11)).view(np.int64)))


def _possible_winners(
    keys: _Hashes, mixed: _Hashes, limits: _Hashes, known: torch.Tensor
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return rows and columns, ascending, whose hash is within their block's limit; `known` is a column of each row.

    numpy has logical shifts and reuses its buffers; a part of all rows at a time stays in the processor's cache.
    """
    padded = len(mixed)
    width = max(BLOCK, _PART // len(keys) // BLOCK * BLOCK)
    found = [(np.arange(len(keys))[:, None] * padded + known.numpy()).ravel()]
    x, shifted = np.empty((2, len(keys), width), dtype=np.uint64)
    for start in range(0, padded, width):
        part = mixed[start : start + width]
        _hash_top_bits(keys, part, x[:, : len(part)], shifted[:, : len(part)])
        block = start // BLOCK
        here = x[:, : len(part)].reshape(len(keys), -1, BLOCK)
        hits = np.flatnonzero(here <= limits[:, block : block + here.shape[1], None])
        found.append(hits // len(part) * padded + hits % len(part) + start)
    row, column = np.divmod(np.sort(np.concatenate(found)), padded)
    real = mixed[column] != 0
    return row[real], column[real]


def _hash_top_bits(keys: _Hashes, mixed: _Hashes, x: _Hashes, shifted: _Hashes) -> None:
    """Compute the hash into `x` without its last step, which leaves the upper 31 bits as they are."""
    np.add(mixed, keys, out=x)
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(x, np.uint64(bits), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.multiply(x, np.uint64(factor), out=x)


def _first_of_least(
    row: npt.NDArray[np.int64], column: npt.NDArray[np.int64], times: npt.NDArray[np.float64], num_rows: int
) -> torch.Tensor:
    """Return the first column of each row with the row's least time; 0 if none is finite."""
    rows = np.arange(num_rows)
    least = np.minimum.reduceat(times, np.searchsorted(row, rows))
    reached = np.flatnonzero(~(times > least[row]))
    return torch.from_numpy(np.where(np.isfinite(least), column[reached[np.searchsorted(row[reached], rows)]], 0))
