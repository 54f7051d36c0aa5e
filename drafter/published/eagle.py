"""EAGLE-1 and 2: decoder layers that read the target's final hidden state.

A row mixes the embedding of token i + 1 with the state after token i. There is no norm before the first layer and none
before the head: the output is the state that the target's head reads, and the next row's hidden state.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from drafter.published.checkpoint_config import MAX_LAYERS, CheckpointConfig
from drafter.published.layers import DecoderShape, DraftLayer, linear
from drafter.published.module import PublishedModule, TargetNeeds, vocab_of
from drafter.published.rows import RowBatch


class PublishedEagle(PublishedModule):
    """An EAGLE-1 or EAGLE-2 drafter; the two differ in how they draft trees, not in their weights."""

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        shape = DecoderShape.of(config)
        layers = config.integer("num_hidden_layers", 1, at_most=MAX_LAYERS)
        super().__init__(config, shape, TargetNeeds(shape.hidden, vocab_of(config), final_state=True), layers)
        self.fc = linear(2 * shape.hidden, shape.hidden, bias="fc.bias" in names)
        self.layers = nn.ModuleList(DraftLayer(shape, input_norm=number > 0) for number in range(layers))

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def step(self, rows: RowBatch, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.fc(torch.cat([self.embed_tokens(tokens), hidden], dim=-1))
        residual = self.through(self.layers, residual, rows)
        return residual, residual
