"""Training Medusa drafters: each head learns the target's own distribution some tokens on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.artifacts.medusa import Medusa, MedusaShape
from outrider.train.data import Example
from outrider.train.fit import best_linear
from outrider.train.methods.interface import Batch, chains, judged_places, likeliest, surprise

_JUDGED_SHARE = 0.35
_FURTHER = 0.8  # the weight of each further head


class MedusaMethod:
    name = "medusa"

    def __init__(self, ends: EmbeddingsAndHead, ids: torch.Tensor, examples: Sequence[Example], *, heads: int) -> None:
        self._ends = ends
        self._medusa = Medusa(MedusaShape(ends.hidden, heads), ids, ends)
        with torch.no_grad():
            for ahead, head in enumerate(self._medusa.heads, 1):
                assert isinstance(head.linear, nn.Linear)
                assert isinstance(head.outer, nn.Linear)
                head.linear.weight.copy_(best_linear(examples, ends.embeddings, ahead)[0])
                head.outer.weight.zero_()

    @property
    def module(self) -> nn.Module:
        return self._medusa

    @property
    def shape(self) -> Mapping[str, Any]:
        return self._medusa.described

    def loss(self, batch: Batch, chance: torch.Generator, done: float) -> torch.Tensor:
        total = torch.zeros((), device=batch.tokens.device)
        for head in range(len(self._medusa.heads)):
            judged = judged_places(batch, _JUDGED_SHARE, chance, ahead=head)
            foretold = self._medusa.foretell(batch.features[judged], batch.tokens[judged], head)
            there = judged.roll(head, dims=1)
            target = self._ends.logits(batch.wanted[there], self._medusa.ids)
            total = total + _FURTHER**head * surprise(target, self._medusa.logits(foretold))
        return total / sum(_FURTHER**head for head in range(len(self._medusa.heads)))

    @torch.inference_mode()
    def held(self, batch: Batch) -> torch.Tensor:
        true = likeliest(self._ends, batch)
        right = []
        for head in range(len(self._medusa.heads)):
            foretold = self._medusa.foretell(batch.features, batch.tokens, head)
            guess = self._medusa.ids[self._medusa.logits(foretold).argmax(dim=-1)]
            # Made where the chain begins, for the token `head` places on: there the true one stands.
            right.append((guess == true.roll(-head, dims=1)).roll(head, dims=1))
        return chains(right, batch.written)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._medusa.weights()
