"""Training of Medusa drafters: each head learns the target's distribution some tokens ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.artifacts.medusa import Medusa, MedusaShape
from outrider.train.data import Example
from outrider.train.fit import best_linear
from outrider.train.methods.interface import Batch, accepted_lengths, cross_entropy, greedy_targets, sample_positions

_TRAINED_SHARE = 0.35
_NEXT_HEAD_WEIGHT = 0.8  # of the loss, relative to the head before


class MedusaMethod:
    """The training of a Medusa drafter."""

    name = "medusa"

    def __init__(
        self, target_weights: EmbeddingsAndHead, ids: torch.Tensor, examples: Sequence[Example], *, heads: int
    ) -> None:
        self._target_weights = target_weights
        self._medusa = Medusa(MedusaShape(target_weights.hidden, heads), ids, target_weights)
        with torch.no_grad():
            for ahead, head in enumerate(self._medusa.heads, 1):
                assert isinstance(head.linear, nn.Linear)
                assert isinstance(head.outer, nn.Linear)
                head.linear.weight.copy_(best_linear(examples, target_weights.embeddings, ahead)[0])
                head.outer.weight.zero_()

    @property
    def module(self) -> nn.Module:
        return self._medusa

    @property
    def shape(self) -> Mapping[str, Any]:
        return self._medusa.described

    def loss(self, batch: Batch, generator: torch.Generator, done: float) -> torch.Tensor:
        total = torch.zeros((), device=batch.tokens.device)
        for head in range(len(self._medusa.heads)):
            chosen = sample_positions(batch, _TRAINED_SHARE, generator, ahead=head)
            predicted = self._medusa.predict(batch.hidden_states[chosen], batch.tokens[chosen], head)
            shifted = chosen.roll(head, dims=1)
            target = self._target_weights.logits(batch.wanted[shifted], self._medusa.ids)
            total = total + _NEXT_HEAD_WEIGHT**head * cross_entropy(target, self._medusa.logits(predicted))
        return total / sum(_NEXT_HEAD_WEIGHT**head for head in range(len(self._medusa.heads)))

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        true = greedy_targets(self._target_weights, batch)
        right = []
        for head in range(len(self._medusa.heads)):
            predicted = self._medusa.predict(batch.hidden_states, batch.tokens, head)
            guess = self._medusa.ids[self._medusa.logits(predicted).argmax(dim=-1)]
            # A guess is made where the chain begins, for the token `head` positions later.
            right.append((guess == true.roll(-head, dims=1)).roll(head, dims=1))
        return accepted_lengths(right, batch.written)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._medusa.weights()
