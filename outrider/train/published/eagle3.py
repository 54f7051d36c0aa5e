"""EAGLE-3.1 as it is trained: decoder layers that read the target's hidden states after several of its layers.

A row at position i has the states g_i of token i and the embedding of token i + 1. The first layer's attention reads
both, each after a norm; the residual is g alone. Behind the target's states the drafter reads its own output after
the final norm (`norm_output`). Parameters have the names of the `speculators` library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead

_NEVER = -1e9


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """The dimensions of a drafter; its width is the target's."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    states: tuple[int, ...]  # the target's layers after which hidden states are read
    layers: int = 1
    rope_theta: float = 10_000.0
    context: int = 8192
    eps: float = 1e-5


class Rotation:
    """The rotation of heads by the positions of their rows.  # [..., rows]"""

    def __init__(self, positions: torch.Tensor, shape: Eagle3Shape) -> None:
        turns = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, device=positions.device) / shape.head_dim)
        angles = torch.cat([positions[..., None] * turns] * 2, dim=-1)
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the last rows turned by their positions.  # [..., rows, head]"""
        cos, sin = self._cos[..., -heads.shape[-2] :, :], self._sin[..., -heads.shape[-2] :, :]
        first, second = heads.float().chunk(2, dim=-1)
        return (heads * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)


class Unrolled:
    """One pass over all positions for each step of drafting; what each position may attend to, and from where."""

    def __init__(self, starts: torch.Tensor, lengths: torch.Tensor, places: int, shape: Eagle3Shape) -> None:
        self.at = torch.arange(places, device=starts.device)
        self._inside = (self.at >= starts[:, None]) & (self.at < lengths[:, None])
        self.rotated = Rotation(self.at, shape)
        self._biases: list[torch.Tensor] = []  # of the attention to the target's states, by step

    def bias(self, step: int) -> torch.Tensor:
        """Return the bias of a step: the target's states `step` and more positions back.  # [batch, 1, 1, at, at]"""
        while len(self._biases) <= step:
            seen = (self.at[:, None] - len(self._biases) >= self.at) & self._inside[:, None]
            seen |= (self.at[:, None] == self.at) & ~self._inside[:, :, None]  # no empty rows
            bias = torch.zeros(seen.shape, device=seen.device, dtype=torch.bfloat16).masked_fill_(~seen, _NEVER)
            self._biases.append(bias[:, None, None])
        return self._biases[step]


class Eagle3Attention(nn.Module):
    """Attention to the target's states, and to the own outputs that led to a position."""

    def __init__(self, shape: Eagle3Shape, inputs: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(
        self, inputs: torch.Tensor, rows: Unrolled, kept: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Attend, and append this step's keys and values to `kept`, which holds those of the steps before."""
        batch, places, _ = inputs.shape

        def heads(flat: torch.Tensor) -> torch.Tensor:  # [batch, kv heads, group, places, head]
            return flat.view(batch, places, self._kv_heads, -1, self._dim).permute(0, 2, 3, 1, 4)

        queries = rows.rotated(heads(self.q_proj(inputs))) * self._dim**-0.5
        kept.append((rows.rotated(heads(self.k_proj(inputs))), heads(self.v_proj(inputs))))
        step = len(kept) - 1
        (keys, values), *own = kept
        scores = [queries @ keys.transpose(-1, -2) + rows.bias(step)]
        shifted = [tuple(_later(part, step - s) for part in pair) for s, pair in enumerate(own, 1)]
        scores += [(queries * key).sum(dim=-1, keepdim=True) for key, _ in shifted]
        weights = torch.softmax(torch.cat(scores, dim=-1).float(), dim=-1).to(values.dtype)
        attended = weights[..., :places] @ values
        for s, (_, value) in enumerate(shifted):
            attended = attended + weights[..., places + s : places + s + 1] * value
        output: torch.Tensor = self.o_proj(attended.permute(0, 3, 1, 2, 4).reshape(batch, places, -1))
        return output


def _later(part: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows moved to later positions; zeros take the first ones.  # [..., places, head]"""
    return functional.pad(part, (0, 0, count, -count)) if count else part


class Eagle3Mlp(nn.Module):
    """The gated network of a layer."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(inputs)) * self.up_proj(inputs))
        return output


class Eagle3Layer(nn.Module):
    """A decoder layer; the first one also reads the embedding."""

    def __init__(self, shape: Eagle3Shape, *, first: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps) if first else None
        self.self_attn = Eagle3Attention(shape, shape.hidden * (1 + first))
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = Eagle3Mlp(shape)

    def forward(
        self,
        residual: torch.Tensor,
        embedded: torch.Tensor,
        rows: Unrolled,
        kept: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        inputs = self.input_layernorm(residual if self.hidden_norm is None else embedded)
        if self.hidden_norm is not None:
            inputs = torch.cat([inputs, self.hidden_norm(residual)], dim=-1)
        residual = residual + self.self_attn(inputs, rows, kept)
        added: torch.Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + added


class Eagle3(nn.Module):
    """The module. Column i of its logits is target id `ids[i]`; embeddings and head are the target's, and constant."""

    def __init__(self, shape: Eagle3Shape, ids: torch.Tensor, target_weights: EmbeddingsAndHead) -> None:
        super().__init__()
        self.shape = shape
        self.ids = ids
        self.embeddings = target_weights.embeddings
        self.fc_norm = nn.ModuleList(nn.RMSNorm(shape.hidden, shape.eps) for _ in shape.states)
        self.fc = nn.Linear(len(shape.states) * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(shape, first=number == 0) for number in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Return g of the target's states.  # [..., hidden] of [..., states × hidden]"""
        parts = states.float().chunk(len(self.fc_norm), dim=-1)
        normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        g: torch.Tensor = self.fc(torch.cat(normed, dim=-1))
        return g

    def unroll(
        self, states: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield what the head reads after each step of drafting: from the target's states, then from these outputs.

        `states[b, i]` are those before `tokens[b, i]`; positions from `starts[b]` to `lengths[b]` are valid. In step s
        a position attends to the target's states up to s positions before it, and then to the outputs that led to it,
        as in drafting.  # each [batch, places, hidden]
        """
        rows = Unrolled(starts, lengths, tokens.shape[1], self.shape)
        embedded = self.embeddings[tokens].float()
        kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers]
        projected = hidden = self.project(states).float()
        while True:
            for layer, pairs in zip(self.layers, kept, strict=True):
                hidden = layer(hidden, embedded, rows, pairs)
            output = self.norm(hidden.float())
            yield output
            hidden = torch.cat([projected[:, :1], output[:, :-1]], dim=1)


def frozen_head_loss(found: torch.Tensor, head: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy under the target's distribution.  # a number, of [rows, hidden]"""
    loss: torch.Tensor = _FrozenHead.apply(found, head, probs)  # type: ignore[no-untyped-call]
    return loss


class _FrozenHead(torch.autograd.Function):
    """Cross-entropy behind a constant head. The gradient is made at once: the logits are read twice, not six times."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, head: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        logits = (found.to(head.dtype) @ head.T).float()
        own = torch.softmax(logits, dim=-1)
        best = own.argmax(dim=-1, keepdim=True)
        normal = logits.gather(1, best) - own.gather(1, best).log()  # log of the sum of exponentials
        ctx.save_for_backward((own.sub(probs).div_(len(found)).to(head.dtype) @ head).to(found.dtype))
        loss: torch.Tensor = (normal.squeeze(1) - torch.linalg.vecdot(probs, logits)).mean()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0], None, None
