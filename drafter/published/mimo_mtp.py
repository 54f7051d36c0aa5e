"""The multi-token prediction module of MiMo, read out of the target's own files.

Each side of a row has a norm, the hidden state comes first, and the embedding at position 0 is zero.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from drafter.published.checkpoint_config import MAX_LAYERS, CheckpointConfig
from drafter.published.layers import DecoderShape, DraftLayer, linear, norm
from drafter.published.module import EMBEDDINGS, PublishedModule, TargetNeeds, vocab_of
from drafter.published.rows import RowBatch

PREFIX = "model.mtp_layers.0."


class MimoMtp(PublishedModule):
    """The first module; a chain runs it again and again."""

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        shape = DecoderShape.of(config)
        layers = config.integer("num_hidden_layers", at_most=MAX_LAYERS)
        needs = TargetNeeds(shape.hidden, vocab_of(config), final_state=True, num_layers=layers)
        super().__init__(config, shape, needs, 1)
        self.token_layernorm = norm(shape.hidden, shape.eps)
        self.hidden_layernorm = norm(shape.hidden, shape.eps)
        self.input_proj = linear(2 * shape.hidden, shape.hidden)
        self.layer = DraftLayer(shape)
        self.final_layernorm = norm(shape.hidden, shape.eps)

    def published_name(self, name: str) -> str | None:
        if name in ("model." + EMBEDDINGS, "lm_head.weight"):
            return name.removeprefix("model.")
        if not name.startswith(PREFIX):
            return None  # of the target
        name = name.removeprefix(PREFIX)
        inner = name.partition(".")[0] in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
        return f"layer.{name}" if inner else name

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def step(self, rows: RowBatch, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed_tokens(tokens).masked_fill((rows.positions == 0)[:, None], 0)
        mixed = self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], dim=-1))
        output = self.final_layernorm(self.through([self.layer], mixed, rows))
        return output, output
