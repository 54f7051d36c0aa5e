"""Decoder layers of drafters, named as the published tensors and made without memory, which loading assigns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from drafter.published.checkpoint_config import CheckpointConfig
from drafter.published.rows import RowBatch
from outrider.protocol.checks import MAX_IDS

_ROPE_KINDS = ("default", "llama3", "linear", "yarn")
_BIASED = ("qwen2", "mimo")  # their queries, keys and values have biases, their outputs have none
QWEN_NEXT, GLM = "qwen3_next", "glm4_moe"
_ROTATED_PARTS = {QWEN_NEXT: 0.25, GLM: 0.5}  # of a head; all others rotate it whole


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The dimensions of a drafter's decoder layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    gated: bool  # the queries' projection also gives a gate for what attention reads
    centred: bool  # norms scale by 1 + weight
    rotary: LlamaRotaryEmbedding

    @classmethod
    def of(cls, config: CheckpointConfig) -> DecoderShape:
        """Return the shape in a configuration with the names of Llama, Qwen2, Qwen3 and their like."""
        config.must_be("hidden_act", "silu")
        config.must_be("quantization_config", {})
        if set(config.texts("layer_types")) - {"full_attention"}:
            config.must_be("layer_types", None)
        kind = config.text("model_type", "llama")
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads, at_most=heads)
        if heads % kv_heads:
            raise config.wrong("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        head_dim = config.integer("head_dim", max(1, hidden // heads))
        qkv_bias = kind in _BIASED or config.flag("qkv_bias", False)
        bias = config.flag("attention_bias", False) and not qkv_bias
        centred = kind == QWEN_NEXT
        if centred:
            config.must_be("attention_bias", False)
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=config.number("rms_norm_eps", 1e-6),
            attention_bias=bias or qkv_bias,
            output_bias=bias and kind != GLM,
            qk_norm=kind == "qwen3" or centred or config.flag("use_qk_norm", False),
            gated=centred,
            centred=centred,
            rotary=_rotary(config, head_dim, _ROTATED_PARTS.get(kind)),
        )

    def norm(self, width: int = 0) -> nn.RMSNorm:
        """Return a norm of this width; 0: of a row."""
        return (CentredNorm if self.centred else nn.RMSNorm)(width or self.hidden, self.eps, device="meta")


def _rotary(config: CheckpointConfig, head_dim: int, part: float | None) -> LlamaRotaryEmbedding:
    """Return the frequencies of a head; `part` is the usual part that is rotated, None for kinds that rotate all."""
    known = config.section("rope_parameters").values or config.section("rope_scaling").values
    given: dict[str, Any] = dict(known)
    rope = config.having(**given)
    if part is None:
        rope.must_be("partial_rotary_factor", 1.0, 1)
    else:
        part = rope.number("partial_rotary_factor", part)
        rotated_width = int(head_dim * part)
        if rotated_width % 2 or not 2 <= rotated_width <= head_dim:
            raise config.wrong("partial_rotary_factor", part, f"an even share of {head_dim} dimensions")
        head_dim = rotated_width
        given.pop("partial_rotary_factor", None)
    kind = given["rope_type"] = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _ROPE_KINDS:
        raise config.wrong("rope_type", kind, ", ".join(_ROPE_KINDS))
    given["rope_theta"] = rope.number("rope_theta", 10_000.0)
    sizes: dict[str, Any] = {
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": config.integer("intermediate_size", at_most=MAX_IDS),
        "max_position_embeddings": config.integer("max_position_embeddings", 2048, at_most=1 << 30),
        "mlp_bias": config.flag("mlp_bias", False),
    }
    try:
        shape = LlamaConfig(**sizes, num_attention_heads=1, head_dim=head_dim, rope_parameters=given)
        rotary = LlamaRotaryEmbedding(shape)
    except Exception as error:  # transformers may raise anything for settings that it does not know
        raise config.wrong("rope_scaling", given, str(error)) from error
    if not bool(torch.isfinite(rotary.inv_freq).all()):
        raise config.wrong("rope_scaling", given, "finite frequencies")
    return rotary


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def norm(width: int, eps: float) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps, device="meta")


class CentredNorm(nn.RMSNorm):
    """A norm whose weights are distances from 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def rotated(heads: torch.Tensor, rotary: LlamaRotaryEmbedding, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the first part of each head, as wide as the frequencies say.  # [heads, tokens, head]"""
    cos, sin = rotary(heads, positions[None])
    turned, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[0] + torch.cat([-second, first], dim=-1) * sin[0]
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class DraftAttention(nn.Module):
    """Attention with rotary positions; `inputs` is the width that it reads."""

    def __init__(self, shape: DecoderShape, inputs: int) -> None:
        super().__init__()
        self._shape = shape
        rows = shape.kv_heads * shape.head_dim
        self.q_proj = linear(inputs, shape.heads * shape.head_dim * (1 + shape.gated), bias=shape.attention_bias)
        self.k_proj = linear(inputs, rows, bias=shape.attention_bias)
        self.v_proj = linear(inputs, rows, bias=shape.attention_bias)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden, bias=shape.output_bias)
        self.q_norm = shape.norm(shape.head_dim) if shape.qk_norm else None
        self.k_norm = shape.norm(shape.head_dim) if shape.qk_norm else None

    def forward(self, inputs: torch.Tensor, rows: RowBatch, layer: int) -> torch.Tensor:
        """Attend to the cached rows and to the new ones, which layer number `layer` caches."""
        queries, *gate = (
            self.q_proj(inputs).view(len(inputs), self._shape.heads, -1).split(self._shape.head_dim, dim=-1)
        )
        queries = self._rotated(queries, self.q_norm, rows.positions)
        attended = rows.attend(layer, queries, *self.keys_and_values(inputs, rows.positions)).transpose(0, 1)
        projected: torch.Tensor = self.o_proj((attended * torch.sigmoid(gate[0]) if gate else attended).flatten(1))
        return projected

    def keys_and_values(self, inputs: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows to cache.  # [kv heads, tokens, head]"""
        values = self.v_proj(inputs).view(len(inputs), -1, self._shape.head_dim).transpose(0, 1)
        return self._rotated(self.k_proj(inputs), self.k_norm, positions), values

    def _rotated(self, rows: torch.Tensor, norm: nn.Module | None, positions: torch.Tensor) -> torch.Tensor:
        heads = rows.reshape(len(rows), -1, self._shape.head_dim).transpose(0, 1)  # [heads, tokens, head]
        return rotated(heads if norm is None else norm(heads), self._shape.rotary, positions)


class DraftLayer(nn.Module):
    """Decoder layer; without `input_norm` its attention reads the residual itself."""

    def __init__(
        self,
        shape: DecoderShape,
        *,
        inputs: int = 0,
        input_norm: bool = True,
        attention: nn.Module | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = attention or DraftAttention(shape, inputs or shape.hidden)
        with torch.device("meta"):
            self.mlp = mlp or LlamaMLP(shape.rotary.config)
        self.input_layernorm = shape.norm() if input_norm else None
        self.post_attention_layernorm = shape.norm()

    def forward(self, residual: torch.Tensor, rows: RowBatch, layer: int) -> torch.Tensor:
        inputs = residual if self.input_layernorm is None else self.input_layernorm(residual)
        return self.attend(inputs, residual, rows, layer)

    def attend(self, inputs: torch.Tensor, residual: torch.Tensor, rows: RowBatch, layer: int) -> torch.Tensor:
        """Return the residual after this layer, whose attention reads `inputs`."""
        residual = residual + self.self_attn(inputs, rows, layer)
        added: torch.Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + added
