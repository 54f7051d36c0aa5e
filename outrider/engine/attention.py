"""Attention for a ragged step: many sessions flattened into one row of tokens, no padding.

Registered with transformers under one name, so that any model whose
attention goes through its attention interface runs here unchanged. The model
hands over queries, keys and values of all sessions at once; keys and values
go to their pages, and each session's rows attend to its own pages only.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from outrider.engine.kv import KvStore, Where
from outrider.engine.paged import Segment, Step
from outrider.engine.pages import PAGE_TOKENS

NAME = "outrider_ragged"

current_step: ContextVar[RaggedStep] = ContextVar("current_step")


@dataclass(slots=True)
class Part:
    """One session's share of a step, as attention sees it."""

    segment: Segment
    device: torch.device
    where: Where = field(init=False)  # its tokens, cached and new
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pages, length = self.segment.pages, self.segment.base + self.segment.count
        first = pages[0]
        if all(page == first + i for i, page in enumerate(pages)):
            self.where = slice(first * PAGE_TOKENS, first * PAGE_TOKENS + length)
        else:
            starts = torch.tensor(pages)[:, None] * PAGE_TOKENS
            self.where = (starts + torch.arange(PAGE_TOKENS)).flatten()[:length].to(self.device)

    def new_slots(self) -> torch.Tensor:
        base = self.segment.base
        if isinstance(self.where, slice):
            return torch.arange(self.where.start + base, self.where.stop, device=self.device)
        return self.where[base:]

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Which cached and new tokens each new row sees, made once per step; None: all.  # [rows, cached + rows]"""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        old, new = self.segment.base, self.segment.count
        if new == 1 and (window is None or old + 1 <= window):
            return None
        mask = torch.cat([torch.ones((new, old), dtype=torch.bool), self.segment.sees()], dim=1)
        if window is not None:
            depths = torch.tensor(self.segment.rows.depths())
            key_positions = torch.cat([torch.arange(old), depths + old])
            mask &= key_positions[None, :] > (depths[:, None] + old - window)
        return mask.to(self.device)


class RaggedStep:
    def __init__(self, step: Step, store: KvStore, device: torch.device) -> None:
        self.store = store
        self.parts = [Part(segment, device) for segment in step.segments]
        self.slots = torch.cat([part.new_slots() for part in self.parts])
        self.layers_run = 0


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
    step.store.write(layer, step.slots, key[0], value[0])
    for part in step.parts:
        new = part.segment.count
        here = slice(part.segment.start, part.segment.end)
        keys, values = step.store.read(layer, part.where)
        # Query heads that share a key head become extra rows: keys and values are read once, never repeated.
        grouped = query[0, :, here].reshape(kv_heads, group * new, dim)
        mask = part.mask(sliding_window)
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
