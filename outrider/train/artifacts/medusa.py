"""Medusa: heads that predict several tokens from one hidden state of the target.

Head k reads the target's final hidden state after token i and the embedding of token i + 1, and predicts the state
after token i + 1 + k. It does not read the tokens between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead

METHOD = "medusa"


class MedusaHead(nn.Module):
    """A linear map plus a non-linear layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * hidden, hidden, bias=False)
        self.inner = nn.Linear(2 * hidden, hidden, bias=False)
        self.outer = nn.Linear(hidden, hidden, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        predicted: torch.Tensor = self.linear(inputs) + self.outer(nn.functional.silu(self.inner(inputs)))
        return predicted


class Medusa(nn.Module):
    """The Medusa module. `ids` are the drafted ids, ascending; column i of its logits is ids[i]."""

    def __init__(self, heads: int, ids: torch.Tensor, target_weights: EmbeddingsAndHead) -> None:
        super().__init__()
        self.ids = ids
        self.heads = nn.ModuleList(MedusaHead(target_weights.hidden) for _ in range(heads))
        self.embeddings = target_weights.embeddings
        self.target_weights = target_weights

    def predict(self, states: torch.Tensor, tokens: torch.Tensor, head: int) -> torch.Tensor:
        """Return a head's predicted states; `states[i]` is the state before `tokens[i]`.  # [..., hidden]"""
        inputs = torch.cat([self.embeddings[tokens].to(states.dtype), states], dim=-1)
        predicted: torch.Tensor = self.heads[head](inputs)
        return predicted

    def logits(self, predicted: torch.Tensor) -> torch.Tensor:
        """Return the logits of the drafted ids."""
        return self.target_weights.logits(predicted, self.ids)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, for the folder."""
        own = {name: weight.to(torch.bfloat16) for name, weight in self.heads.state_dict().items()}
        return own | {"ids": self.ids.to(torch.int32)}

    @classmethod
    def from_weights(
        cls, shape: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target_weights: EmbeddingsAndHead
    ) -> Medusa:
        medusa = cls(shape["heads"], weights["ids"].long().to(target_weights.head.device), target_weights)
        medusa.heads.load_state_dict({name: weight.float() for name, weight in weights.items() if name != "ids"})
        return medusa
