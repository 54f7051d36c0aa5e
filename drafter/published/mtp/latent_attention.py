"""Multi-head latent attention of DeepSeek, with the keys and values of every head in the cache."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from drafter.published.checkpoint_config import CheckpointConfig
from drafter.published.layers import DecoderShape, linear, norm, rotated
from drafter.published.rows import RowBatch


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one narrow row of a token. One rotated key serves all heads."""

    def __init__(self, config: CheckpointConfig, shape: DecoderShape) -> None:
        super().__init__()
        config.must_be("attention_bias", False)
        config.must_be("rope_interleave", True)
        self._shape = shape  # its head dimension is that of the rotated part
        self._plain = config.integer("qk_nope_head_dim")
        self._values = config.integer("v_head_dim", at_most=self._plain + shape.head_dim)
        self._rank = config.integer("kv_lora_rank")
        width, hidden, heads = self._plain + shape.head_dim, shape.hidden, shape.heads
        if config.values.get("q_lora_rank") is None:
            self.q_proj = linear(hidden, heads * width)
        else:
            rank = config.integer("q_lora_rank")
            self.q_a_proj = linear(hidden, rank)
            self.q_a_layernorm = norm(rank, shape.eps)
            self.q_b_proj = linear(rank, heads * width)
        self.kv_a_proj_with_mqa = linear(hidden, self._rank + shape.head_dim)
        self.kv_a_layernorm = norm(self._rank, shape.eps)
        self.kv_b_proj = linear(self._rank, heads * (self._plain + self._values))
        self.o_proj = linear(heads * self._values, hidden)
        self._sharpness = _sharpness(config.having(**shape.rotary.config.rope_parameters))

    def forward(self, inputs: torch.Tensor, rows: RowBatch, layer: int) -> torch.Tensor:
        low_rank = not hasattr(self, "q_proj")
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs))) if low_rank else self.q_proj(inputs)
        queries = self._with_rotated_end(queries.view(len(inputs), self._shape.heads, -1).transpose(0, 1), rows)
        latent, shared = self.kv_a_proj_with_mqa(inputs).split([self._rank, self._shape.head_dim], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(len(inputs), self._shape.heads, -1).transpose(0, 1)
        plain, values = expanded.split([self._plain, self._values], dim=-1)
        keys = torch.cat([plain, shared[None].expand(self._shape.heads, -1, -1)], dim=-1)
        keys = self._with_rotated_end(keys, rows)
        padded = functional.pad(values, (0, keys.shape[-1] - self._values))  # the cache has one width
        attended = rows.attend(layer, queries * self._sharpness, keys, padded)[..., : self._values]
        projected: torch.Tensor = self.o_proj(attended.transpose(0, 1).flatten(1))
        return projected

    def _with_rotated_end(self, heads: torch.Tensor, rows: RowBatch) -> torch.Tensor:
        """Rotate the end of each head; its pairs lie side by side, and are put half by half first."""
        plain, end = heads[..., : self._plain], heads[..., self._plain :]
        halves = torch.cat([end[..., ::2], end[..., 1::2]], dim=-1)
        return torch.cat([plain, rotated(halves, self._shape.rotary, rows.positions)], dim=-1)


def _sharpness(rope: CheckpointConfig) -> float:
    """Return the factor of all scores by which YaRN makes up for a longer context."""
    if rope.text("rope_type") != "yarn" or not rope.values.get("mscale_all_dim"):
        return 1.0
    return (0.1 * rope.number("mscale_all_dim", 1.0) * math.log(max(1.0, rope.number("factor", 1.0))) + 1.0) ** 2
