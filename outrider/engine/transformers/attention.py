"""Attention for a ragged step: the tokens of many sessions in one flat batch, without padding.

It is registered with transformers under one name. Any model whose attention goes through the attention interface of
transformers runs unchanged. The model passes queries, keys and values of all sessions at once. Keys and values go to
their blocks, and each session's tokens attend to its own blocks only.

A mask over the tokens of a step cannot express this, because the keys are in the cache. The model gets a placeholder
for the rule that would make the mask (causal, sliding window, chunks), and attention applies the rule to the true
positions. A mask from any other source is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.engine.paged.step import ForwardStep, Segment
from outrider.engine.transformers.kv_cache import KvStore, Slots
from outrider.protocol.errors import ModelMismatch

NAME = "outrider_ragged"

# (batch, head, query position, key position) → whether the query attends to the key. Broadcasts over positions.
Rule = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
_sliding: Callable[[int], Rule] = lru_cache(sliding_window_causal_mask_function)

current_step: ContextVar[RaggedStep] = ContextVar("current_step")


@dataclass(slots=True)
class AttentionSegment:
    """One session's share of a step, with its slots and masks."""

    segment: Segment
    device: torch.device
    slots: Slots = field(init=False)  # of its tokens, cached and new
    masks: dict[Rule, torch.Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks, length = self.segment.blocks, self.segment.base + self.segment.count
        first = blocks[0]
        if all(block == first + i for i, block in enumerate(blocks)):
            self.slots = slice(first * BLOCK_TOKENS, first * BLOCK_TOKENS + length)
        else:
            starts = torch.tensor(blocks)[:, None] * BLOCK_TOKENS
            self.slots = (starts + torch.arange(BLOCK_TOKENS)).flatten()[:length].to(self.device)

    def new_slots(self) -> torch.Tensor:
        """Return the slots of its new tokens."""
        base = self.segment.base
        if isinstance(self.slots, slice):
            return torch.arange(self.slots.start + base, self.slots.stop, device=self.device)
        return self.slots[base:]

    def mask(self, rule: Rule) -> torch.Tensor | None:
        """Return which tokens each new one attends to, made once per step; None: all.  # [new, cached + new]"""
        if rule not in self.masks:
            self.masks[rule] = self._make_mask(rule)
        return self.masks[rule]

    def _make_mask(self, rule: Rule) -> torch.Tensor | None:
        old, new = self.segment.base, self.segment.count
        if new == 1 and rule is causal_mask_function:
            return None
        among_new = self.segment.mask
        if among_new is None:
            among_new = torch.ones((new, new), dtype=torch.bool).tril()
        mask = torch.cat([torch.ones((new, old), dtype=torch.bool), among_new], dim=1).to(self.device)
        if rule is not causal_mask_function:  # ancestors are at lower positions: the tree mask is causal already
            queries = torch.tensor(self.segment.positions, device=self.device)
            keys = torch.cat([torch.arange(old, device=self.device), queries])
            mask &= allowed(rule, queries, keys)
        return mask


class RaggedStep:
    """The step that is running: its segments, slots, and the mask rules of the layers so far."""

    def __init__(self, step: ForwardStep, store: KvStore, device: torch.device) -> None:
        self.store = store
        self.parts = [AttentionSegment(segment, device) for segment in step.segments]
        self.slots = torch.cat([part.new_slots() for part in self.parts])
        self.rules: dict[int, Rule] = {}  # by layer, of those that have run
        self.masks: dict[int, tuple[torch.Tensor, Rule]] = {}  # by address, which is fixed while the tensor is stored

    def enter(self, layer: int, keys: int, mask: torch.Tensor | None, window: int | None) -> Rule:
        """Return the mask rule of a layer. Raises ModelMismatch for a layer that cannot run here."""
        if layer in self.rules:
            raise ModelMismatch(f"layer {layer} attends twice in one step", field="target")
        if keys != len(self.slots):
            message = f"layer {layer} attends to {keys} keys in a step of {len(self.slots)} tokens"
            raise ModelMismatch(message, field="target")
        self.rules[layer] = rule = self._rule(layer, mask, window)
        return rule

    def _rule(self, layer: int, mask: torch.Tensor | None, window: int | None) -> Rule:
        if mask is None:
            return causal_mask_function if window is None else _sliding(window)
        known = self.masks.get(mask.untyped_storage().data_ptr())
        if known is None:
            raise ModelMismatch(
                f"layer {layer} makes an attention mask of its own, which may depend on the text: only masks that "
                "depend on positions are known (causal, sliding window, chunks)",
                field="target",
            )
        return known[1]


def allowed(rule: Rule, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return which queries attend to which keys by a rule, from their positions.  # [queries, keys]"""
    try:
        return rule(0, 0, queries[:, None], keys[None, :]).expand(len(queries), len(keys))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelMismatch(f"its attention mask depends on more than positions: {error}", field="target") from error


def ragged_mask(
    *, q_length: int, kv_length: int, mask_function: Rule, dtype: torch.dtype, device: torch.device, **_: Any
) -> torch.Tensor:
    """Return a placeholder where transformers makes a mask, which the model passes around in its place."""
    mask = torch.zeros(1, dtype=dtype, device=device)
    current_step.get().masks[mask.untyped_storage().data_ptr()] = mask, mask_function
    return mask.expand(1, 1, q_length, kv_length)


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
    """Map query [1, heads, tokens, dim], key and value [1, kv heads, tokens, dim] to [1, tokens, heads, dim]."""
    step = current_step.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    rule = step.enter(layer, key.shape[2], attention_mask, sliding_window)
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    group = heads // kv_heads
    scale = scaling if scaling is not None else dim**-0.5
    out = query.new_empty((1, query.shape[2], heads, value.shape[3]))
    step.store.write(layer, step.slots, key[0], value[0])

    def attend(part: AttentionSegment, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        new = part.segment.count
        # Query heads that share a key head become extra queries: keys and values are read once, never repeated.
        grouped = query[0, :, part.segment.start : part.segment.end].reshape(kv_heads, group * new, dim)
        mask = part.mask(rule)
        if mask is not None and group > 1:
            mask = mask.repeat(group, 1)
        if softcap is None and s_aux is None:
            attended = torch.nn.functional.scaled_dot_product_attention(
                grouped[None], keys[None], values[None], attn_mask=mask, scale=scale
            )[0]
        else:
            sinks = None if s_aux is None else s_aux.reshape(kv_heads, group, 1).expand(-1, -1, new)
            attended = _explicit(grouped, keys, values, mask, scale, softcap, sinks)
        return attended.reshape(heads, new, -1).transpose(0, 1)

    for part in step.parts:
        out[0, part.segment.start : part.segment.end] = attend(part, *step.store.read(layer, part.slots))
    masked = [(part, mask) for part in step.parts if (mask := part.mask(rule)) is not None]
    if masked and not bool(out.isfinite().all()):
        # A masked key has weight 0, and 0 · NaN is NaN. Tokens whose keys or values are not finite count as zeros for
        # tokens that do not attend to them; those that do are NaN.
        for part, mask in masked:
            keys, values = step.store.read(layer, part.slots)
            bad = ~(keys.isfinite().all(dim=2) & values.isfinite().all(dim=2)).all(dim=0)  # [tokens]
            if bool(bad.any()):
                attended = attend(part, keys.masked_fill(bad[:, None], 0), values.masked_fill(bad[:, None], 0))
                attended[(mask & bad).any(dim=1)] = float("nan")
                out[0, part.segment.start : part.segment.end] = attended
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
    """Compute attention step by step, for models that cap scores (Gemma 2) or have a sink per head (gpt-oss)."""
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
AttentionMaskInterface.register(NAME, ragged_mask)
