"""Rows that sessions append to their keys and values in one pass of a drafter's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.protocol.speculation import TreeShape

_FIRST_CAPACITY = 64


class DraftKvCache:
    """Keys and values of one session in a drafter's layers."""

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._layers: list[torch.Tensor | None] = [None] * layers  # [2, kv heads, capacity, head]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add rows after the first `length`; return all keys and values of the layer.  # [kv heads, rows, head]"""
        known, end = self._layers[layer], self.length + keys.shape[1]
        if known is None or known.shape[2] < end:
            grown = keys.new_empty(2, keys.shape[0], max(_FIRST_CAPACITY, 2 * end), keys.shape[2])
            if known is not None:
                grown[:, :, : self.length] = known[:, :, : self.length]
            self._layers[layer] = known = grown
        known[0, :, self.length : end], known[1, :, self.length : end] = keys, values
        return known[0, :, :end], known[1, :, :end]

    def truncate(self, length: int) -> None:
        """Drop the rows after the first `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}, must be 0 to {self.length}")
        self.length = length


@dataclass(frozen=True, slots=True)
class SessionRows:
    """New rows of one session: a chain, or a tree with `parents`. Rows that are not causal see one another."""

    cache: DraftKvCache
    count: int
    parents: Sequence[int] = ()
    causal: bool = True

    def positions(self) -> list[int]:
        return [self.cache.length + depth - 1 for depth in TreeShape.of(self.parents, self.count).depths]

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Return which cached and new rows each new row sees; None: all.  # [count, length + count]"""
        if not self.causal or self.count == 1:
            return None
        among = torch.ones(self.count, self.count, dtype=torch.bool).tril()
        if self.parents:
            among = torch.zeros_like(among)
            for row, path in enumerate(TreeShape.of(self.parents, self.count).paths):
                among[row, list(path)] = True
        return torch.cat([among.new_ones(self.count, self.cache.length), among], dim=1).to(device)


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """States of committed tokens that a session's cache lacks, and the token after each of them."""

    cache: DraftKvCache
    states: torch.Tensor  # projected  # [rows, width]
    tokens: Sequence[int]

    def token_ids(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.tokens, device=device)


class RowBatch:
    """The new rows of several sessions, one after the other. Their caches count them after `advance`."""

    def __init__(self, parts: Sequence[SessionRows], device: torch.device) -> None:
        self._parts = parts
        self._masks = [part.mask(device) for part in parts]
        self.positions = torch.tensor([at for part in parts for at in part.positions()], device=device)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cache the rows of a layer; return the keys and values of each session.  # [kv heads, rows, head]"""
        counts = [part.count for part in self._parts]
        split = zip(self._parts, torch.split(keys, counts, dim=1), torch.split(values, counts, dim=1), strict=True)
        return [part.cache.append(layer, *new) for part, *new in split]

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Cache the rows of a layer, and return what they read in their own sessions.  # [heads, rows, head]"""
        known = self.append(layer, keys, values)
        split = torch.split(queries, [part.count for part in self._parts], dim=1)
        read = [
            functional.scaled_dot_product_attention(
                rows[None], session_keys[None], session_values[None], attn_mask=mask, enable_gqa=True
            )[0]
            for rows, (session_keys, session_values), mask in zip(split, known, self._masks, strict=True)
        ]
        return torch.cat(read, dim=1)

    def advance(self) -> None:
        """Keep the rows that all layers have cached."""
        for part in self._parts:
            part.cache.length += part.count
