"""Training of Medusa drafters: each head learns the target's distribution some tokens ahead."""

from __future__ import annotations

import torch

from outrider.train.artifacts.medusa import Medusa, MedusaHead
from outrider.train.fit import best_linear
from outrider.train.methods import interface
from outrider.train.methods.interface import Batch, TrainingInputs

_NEXT_HEAD_WEIGHT = 0.8  # of the loss, relative to the head before


class MedusaMethod:
    """The training of a Medusa drafter."""

    def __init__(self, inputs: TrainingInputs, *, heads: int) -> None:
        self._target_weights = inputs.target_weights
        self._drafted = self._target_weights.cut(inputs.ids)
        self.module = Medusa(heads, inputs.ids, self._target_weights)
        self.shape = {"hidden": self._target_weights.hidden, "heads": heads}
        with torch.no_grad():
            for ahead, head in enumerate(self.module.heads, 1):
                assert isinstance(head, MedusaHead)
                head.linear.weight.copy_(best_linear(inputs.examples, self.module.embeddings, ahead)[0])
                head.outer.weight.zero_()

    def loss(self, batch: Batch, generator: torch.Generator, done: float) -> torch.Tensor:
        total = torch.zeros((), device=batch.tokens.device)
        for head in range(len(self.module.heads)):
            chosen = interface.sample_positions(batch, generator, ahead=head)
            predicted = self.module.predict(batch.hidden_states[chosen], batch.tokens[chosen], head)
            target = self._drafted.probs(batch.wanted[chosen.roll(head, dims=1)])
            total = total + _NEXT_HEAD_WEIGHT**head * interface.cross_entropy(target, self.module.logits(predicted))
        return total / sum(_NEXT_HEAD_WEIGHT**head for head in range(len(self.module.heads)))

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        true = interface.greedy_targets(self._target_weights, batch)
        right = []
        for head in range(len(self.module.heads)):
            predicted = self.module.predict(batch.hidden_states, batch.tokens, head)
            guess = self.module.ids[self.module.logits(predicted).argmax(dim=-1)]
            # A guess is made where the chain begins, for the token `head` positions later.
            right.append((guess == true.roll(-head, dims=1)).roll(head, dims=1))
        return interface.accepted_lengths(right, batch.written)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.module.weights()
