"""Attention for a ragged step: many sessions flattened into one row of tokens, no padding.

Registered with transformers under one name, so that any model whose
attention goes through its attention interface runs here unchanged. The model
hands over queries, keys and values of all sessions at once; each session's
part is written to its own cache and attends to nothing else.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from outrider.engine.interface import Rows
from outrider.engine.kv import SessionCache

NAME = "outrider_ragged"

current_step: ContextVar[RaggedStep] = ContextVar("current_step")


@dataclass(slots=True)
class Segment:
    """One session's share of a step."""

    cache: SessionCache
    rows: Rows
    start: int
    end: int
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which cached and new tokens each new row sees, made once per step; None: all.  # [rows, cached + rows]"""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window, device)
        return self.masks[window]

    def _make_mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        old, new = self.cache.length, self.end - self.start
        if new == 1 and (window is None or old + 1 <= window):
            return None
        among = torch.ones((new, new), dtype=torch.bool).tril()
        if self.rows.parents:
            among = torch.eye(new, dtype=torch.bool)
            for row, parent in enumerate(self.rows.parents):
                if parent >= 0:
                    among[row] |= among[parent]
        mask = torch.cat([torch.ones((new, old), dtype=torch.bool), among], dim=1)
        if window is not None:
            depths = torch.tensor(self.rows.depths())
            key_positions = torch.cat([torch.arange(old), depths + old])
            mask &= key_positions[None, :] > (depths[:, None] + old - window)
        return mask.to(device)


@dataclass(slots=True)
class RaggedStep:
    segments: list[Segment]
    layers_run: int = 0


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Query [1, heads, tokens, dim], key and value [1, kv heads, tokens, dim] → [1, tokens, heads, dim]."""
    step = current_step.get()
    step.layers_run += 1
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    group = heads // kv_heads
    scale = scaling if scaling is not None else dim**-0.5
    out = query.new_empty((1, query.shape[2], heads, value.shape[3]))
    for segment in step.segments:
        new = segment.end - segment.start
        here = slice(segment.start, segment.end)
        keys, values = segment.cache.write(layer, key[0, :, here], value[0, :, here])
        # Query heads that share a key head become extra rows: keys and values are read once, never repeated.
        grouped = query[0, :, here].reshape(kv_heads, group * new, dim)
        mask = segment.mask(sliding_window, query.device)
        if mask is not None and group > 1:
            mask = mask.repeat(group, 1)
        if softcap is None and s_aux is None:
            attended = torch.nn.functional.scaled_dot_product_attention(
                grouped[None], keys[None], values[None], attn_mask=mask, scale=scale
            )[0]
        else:
            sinks = None if s_aux is None else s_aux.reshape(kv_heads, group, 1).expand(-1, -1, new)
            attended = _explicit(grouped, keys, values, mask, scale, softcap, sinks)
        out[0, here] = attended.reshape(heads, new, -1).transpose(0, 1)
    return out, None


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Written out, for models that cap their scores (Gemma 2) or have a sink per head (gpt-oss)."""
    scores = (query @ keys.transpose(1, 2) * scale).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(scores.shape[0], -1, 1).float()], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(values.dtype) @ values


AttentionInterface.register(NAME, ragged_attention)
