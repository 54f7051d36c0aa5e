"""Keys and values of all sessions in torch tensors, per layer, one slot per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.speculation.noise import to_device

Slots = slice | torch.Tensor  # slots in order: a contiguous run, or their numbers


class KvStore:
    """Keys and values by layer. A layer's tensors are allocated at its first write, which shows their shapes."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._device = device
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def token_bytes(self) -> int:
        """Return the size of a token's keys and values, known after the first step."""
        return sum(part.nbytes for layer in self._layers.values() for part in layer) // self._num_slots

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [heads, tokens, dim] of new tokens into their slots."""
        stored = self._layers.get(layer)
        if stored is None:
            stored = self._layers[layer] = self._allocate_like(keys), self._allocate_like(values)
        stored[0].index_copy_(1, slots, keys)
        stored[1].index_copy_(1, slots, values)

    def read(self, layer: int, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [heads, tokens, dim], without a copy where the slots are contiguous."""
        keys, values = self._layers[layer]
        if isinstance(slots, slice):
            return keys[:, slots], values[:, slots]
        return keys.index_select(1, slots), values.index_select(1, slots)

    def copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Copy keys and values from slots to slots. All are read before any is written."""
        source, target = to_device(torch.tensor([old, new]), self._device)
        for layer in self._layers.values():
            for buffer in layer:
                buffer.index_copy_(1, target, buffer.index_select(1, source))

    def _allocate_like(self, new: torch.Tensor) -> torch.Tensor:
        return torch.empty((new.shape[0], self._num_slots, new.shape[2]), dtype=new.dtype, device=new.device)
