"""Keys and values of all sessions in torch tensors, per layer, one slot per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Where = slice | torch.Tensor  # slots in order: a run of neighbours, or their numbers


class KvStore:
    """Made for a layer when it first writes: only the model knows the shapes."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._device = device
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values [heads, tokens, dim] of new tokens into their slots."""
        held = self._layers.get(layer)
        if held is None:
            held = self._layers[layer] = self._room_like(keys), self._room_like(values)
        held[0].index_copy_(1, slots, keys)
        held[1].index_copy_(1, slots, values)

    def read(self, layer: int, where: Where) -> tuple[torch.Tensor, torch.Tensor]:
        """[heads, tokens, dim] each; without a copy where the slots are neighbours."""
        keys, values = self._layers[layer]
        if isinstance(where, slice):
            return keys[:, where], values[:, where]
        return keys.index_select(1, where), values.index_select(1, where)

    def move(self, old: Sequence[int], new: Sequence[int]) -> None:
        """All are read before any is written."""
        source = torch.tensor(old, device=self._device)
        target = torch.tensor(new, device=self._device)
        for layer in self._layers.values():
            for buffer in layer:
                buffer.index_copy_(1, target, buffer.index_select(1, source))

    def _room_like(self, new: torch.Tensor) -> torch.Tensor:
        return torch.empty((new.shape[0], self._num_slots, new.shape[2]), dtype=new.dtype, device=new.device)
