"""Keys and values of one session, per layer, in buffers that grow by doubling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_FIRST_CAPACITY = 64


class SessionCache:
    """`length` tokens are valid; forgetting is lowering it, so rollback costs nothing."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new rows behind the valid ones without making them valid yet; all rows so far.  # [heads, rows, dim]"""
        start, end = self.length, self.length + keys.shape[1]
        held = self._layers.get(layer)
        if held is None or held[0].shape[1] < end:
            held = (self._grown(held and held[0], keys, end), self._grown(held and held[1], values, end))
            self._layers[layer] = held
        held[0][:, start:end] = keys
        held[1][:, start:end] = values
        return held[0][:, :end], held[1][:, :end]

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Make base + len(rows) tokens valid, moving the chosen rows together."""
        if any(row != i for i, row in enumerate(rows)):
            for held in self._layers.values():
                for buffer in held:
                    index = torch.tensor(rows, dtype=torch.int64, device=buffer.device) + base
                    buffer[:, base : base + len(rows)] = buffer[:, index]
        self.length = base + len(rows)

    def copy(self) -> SessionCache:
        twin = SessionCache()
        twin.length = self.length
        twin._layers = {layer: (keys.clone(), values.clone()) for layer, (keys, values) in self._layers.items()}
        return twin

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor, needed: int) -> torch.Tensor:
        capacity = max(_FIRST_CAPACITY, 1 << (needed - 1).bit_length())
        new = torch.empty((like.shape[0], capacity, like.shape[2]), dtype=like.dtype, device=like.device)
        if old is not None:
            new[:, : self.length] = old[:, : self.length]
        return new
