"""What a way of making drafters offers to the training loop, and the batches that it learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from outrider.train.data import Example

_WINDOWED = 0.5  # of the examples, learnt without the beginning of the prompt: others' caches may hold its states


@dataclass(frozen=True, slots=True)
class Batch:
    """Place i of an example: the target's state after token i and the token after it; to be learnt is the state after
    that one. Places from `starts` up to `lengths` are there, those from `outputs` on were written by the target."""

    features: torch.Tensor  # [batch, places, hidden]
    tokens: torch.Tensor  # [batch, places]
    wanted: torch.Tensor  # [batch, places, hidden]
    starts: torch.Tensor  # [batch]
    outputs: torch.Tensor  # [batch]
    lengths: torch.Tensor  # [batch]

    @property
    def written(self) -> torch.Tensor:
        """Places whose next token was written by the target.  # [batch, places]"""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (at >= self.outputs[:, None]) & (at < self.lengths[:, None])


def collate(
    examples: Sequence[Example], most: int, device: torch.device, chance: torch.Generator | None = None
) -> Batch:
    """Examples beside each other, each cut to its first `most` places. With `chance` some lack their beginning."""
    lengths = [min(len(example.tokens) - 2, most) for example in examples]
    places, width = max(lengths), examples[0].features.shape[1]
    features = torch.zeros(len(examples), places, width)
    wanted = torch.zeros(len(examples), places, width)
    tokens = torch.zeros(len(examples), places, dtype=torch.long)
    starts, outputs = [], []
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        features[row, :length] = example.features[:length].float()
        wanted[row, :length] = example.features[1 : length + 1].float()
        tokens[row, :length] = example.tokens[1 : length + 1]
        output = max(0, min(example.prompt_length - 2, length - 1))
        outputs.append(output)
        start = 0
        if chance is not None and output and float(torch.rand(1, generator=chance)) < _WINDOWED:
            start = int(torch.randint(output, (1,), generator=chance))
        starts.append(start)
    held = (torch.tensor(each, device=device) for each in (starts, outputs, lengths))
    return Batch(features.to(device), tokens.to(device), wanted.to(device), *held)


class Method(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def module(self) -> nn.Module:
        """What is trained; parameters that do not require gradients stay as they are."""
        ...

    @property
    def shape(self) -> Mapping[str, Any]:
        """For the card: what the weights are made into."""
        ...

    def loss(self, batch: Batch, chance: torch.Generator, done: float) -> torch.Tensor:
        """`done`: how much of the training is over, from 0 to 1."""
        ...

    def held(self, batch: Batch) -> torch.Tensor:
        """For the chain of guesses that begins at each place written by the target, how many hold; −1 at the other
        places.  # [batch, places]"""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """For the folder."""
        ...


@torch.inference_mode()
def acceptance(held: torch.Tensor, gamma: int) -> dict[str, Any]:
    """From `Method.held`, as the card says it."""
    held = held[held >= 0]
    rates = []
    reached = held
    for depth in range(gamma):
        rates.append(float((reached > depth).float().mean()) if len(reached) else 0.0)
        reached = reached[reached > depth]
    return {
        "acceptance": [round(rate, 4) for rate in rates],
        "acceptance_length": round(1.0 + float(held.clamp(max=gamma).float().mean()), 4),
    }
