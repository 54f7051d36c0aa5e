"""DSpark as it is trained: blocks of guesses after anchors, in one pass over the target's states up to each anchor.

A block has the anchor's token and mask tokens. Its rows see one another, and the target's states as keys and values.
The row at place k guesses the token k + 1 after the anchor: a bias that depends on the token before it is added to its
logits, and a confidence says how likely the guess is accepted. Parameters have the names of the `speculators` library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.methods.published_markov import MARKOV_HEADS
from outrider.train.published.eagle3 import Eagle3Mlp, Eagle3Shape, Rotation


@dataclass(frozen=True, slots=True)
class DsparkShape(Eagle3Shape):
    """The dimensions of a DSpark drafter."""

    block: int = 4  # guesses of a pass
    rank: int = 256  # of the Markov head
    markov: str = "vanilla"  # kind of that head
    mask: int = 0  # the token of guesses that are not known yet


class AnchoredBlocks:
    """The rows of all blocks: their positions, and what each attends to."""

    def __init__(self, anchors: torch.Tensor, starts: torch.Tensor, places: int, shape: DsparkShape) -> None:
        """Place a block after each of `anchors`; the target's states are known from `starts` on.  # [batch, blocks]"""
        known = torch.arange(places, device=anchors.device)
        ahead = torch.arange(1, shape.block + 1, device=anchors.device)
        at = torch.cat([known.expand(len(anchors), -1), (anchors[..., None] + ahead).flatten(1)], dim=1)
        self.rotated = Rotation(at[:, None], shape)
        seen = (known >= starts[:, None, None]) & (known <= anchors[..., None])
        own = torch.eye(anchors.shape[1], dtype=torch.bool, device=at.device).repeat_interleave(shape.block, dim=1)
        rows = torch.cat([seen, own.expand(len(anchors), -1, -1)], dim=2).repeat_interleave(shape.block, dim=1)
        self.mask = rows[:, None]  # [batch, 1, rows, places + rows]


class DsparkAttention(nn.Module):
    """Attention of blocks to themselves and to the target's states."""

    def __init__(self, shape: DsparkShape) -> None:
        super().__init__()
        self._dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(shape.head_dim, shape.eps) for _ in range(2))

    def forward(self, inputs: torch.Tensor, context: torch.Tensor, blocks: AnchoredBlocks) -> torch.Tensor:
        def heads(rows: torch.Tensor) -> torch.Tensor:  # [batch, heads, rows, head]
            return rows.view(*rows.shape[:2], -1, self._dim).transpose(1, 2)

        both = torch.cat([context, inputs], dim=1)
        values = heads(self.v_proj(both))
        queries = blocks.rotated(self.q_norm(heads(self.q_proj(inputs)).float())).to(values.dtype)
        keys = blocks.rotated(self.k_norm(heads(self.k_proj(both)).float())).to(values.dtype)
        attended = functional.scaled_dot_product_attention(queries, keys, values, blocks.mask, enable_gqa=True)
        output: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class DsparkLayer(nn.Module):
    """A decoder layer of blocks."""

    def __init__(self, shape: DsparkShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = DsparkAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = Eagle3Mlp(shape)

    def forward(self, residual: torch.Tensor, context: torch.Tensor, blocks: AnchoredBlocks) -> torch.Tensor:
        residual = residual + self.self_attn(self.input_layernorm(residual), context, blocks)
        added: torch.Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + added


class Dspark(nn.Module):
    """The module. Column i of its logits is target id `ids[i]`. Head and embeddings, but the mask's, are constant."""

    def __init__(self, shape: DsparkShape, ids: torch.Tensor, target_weights: EmbeddingsAndHead) -> None:
        super().__init__()
        self.shape, self.ids = shape, ids
        self._embeddings = target_weights.embeddings
        self.mask = nn.Parameter(self._embeddings.float().mean(dim=0))
        self.fc = nn.Linear(len(shape.states) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(DsparkLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.markov_head = MARKOV_HEADS[shape.markov](len(self._embeddings), len(ids), shape.rank, shape.hidden)
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(shape.hidden + shape.rank, 1)})

    @property
    def embeddings(self) -> torch.Tensor:
        """Return the target's embeddings, with the mask's own.  # [vocab, hidden]"""
        embeddings = self._embeddings.detach().clone()
        embeddings[self.shape.mask] = self.mask.detach().to(embeddings)
        return embeddings

    def forward(
        self, states: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """Return what the head reads of each guess after `anchors`, whose tokens are `tokens`.

        `states[b, i]` are those before the token that anchor i of text b names.  # [batch, blocks, block, hidden]
        """
        blocks = AnchoredBlocks(anchors, starts, states.shape[1], self.shape)
        masks = self.mask.expand(*anchors.shape, self.shape.block - 1, -1)
        residual = torch.cat([self._embeddings[tokens][:, :, None].float(), masks], dim=2)
        context = self.hidden_norm(self.fc(states.float()).float())
        rows = residual.flatten(1, 2)
        for layer in self.layers:
            rows = layer(rows, context, blocks)
        output: torch.Tensor = self.norm(rows.float()).view_as(residual)
        return output

    def beside(self, hidden: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the tokens before the guesses of blocks add to their logits, and the logits of the confidence."""
        row, added = self.markov_head.markov_w1(previous), []
        state = row.new_zeros(*row.shape[:-2], self.markov_head.state_width)
        for place in range(hidden.shape[-2]):
            state, bias = self.markov_head(state, previous[..., place], hidden[..., place, :])
            added.append(bias)
        confidence = self.confidence_head["proj"](torch.cat([hidden, row], dim=-1))
        return torch.stack(added, dim=-2), confidence.squeeze(-1).float()
