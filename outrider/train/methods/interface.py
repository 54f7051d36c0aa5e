"""What a way of making drafters offers to the training loop, and the batches that it learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.data import Example

_WINDOWED = 0.5  # of the examples, learnt without the beginning of the prompt: others' caches may hold its states


@dataclass(frozen=True, slots=True)
class Batch:
    """Place i of an example: the target's state after token i and the token after it; to be learnt is the state after
    that one. Places from `starts` up to `lengths` are there, those from `outputs` on were written by the target."""

    first: torch.Tensor  # token 0  # [batch]
    hidden_states: torch.Tensor  # [batch, places, hidden]
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
    places, width = max(lengths), examples[0].hidden_states.shape[1]
    hidden_states = torch.zeros(len(examples), places, width)
    wanted = torch.zeros(len(examples), places, width)
    tokens = torch.zeros(len(examples), places, dtype=torch.long)
    starts, outputs = [], []
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        hidden_states[row, :length] = example.hidden_states[:length].float()
        wanted[row, :length] = example.hidden_states[1 : length + 1].float()
        tokens[row, :length] = example.tokens[1 : length + 1]
        output = max(0, min(example.prompt_length - 2, length - 1))
        outputs.append(output)
        start = 0
        if chance is not None and output and float(torch.rand(1, generator=chance)) < _WINDOWED:
            start = int(torch.randint(output, (1,), generator=chance))
        starts.append(start)
    held = (torch.tensor(each, device=device) for each in (starts, outputs, lengths))
    first = torch.stack([example.tokens[0] for example in examples])
    return Batch(first.to(device), hidden_states.to(device), tokens.to(device), wanted.to(device), *held)


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

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """For the chain of guesses that begins at each place written by the target, how many hold; −1 at the other
        places.  # [batch, places]"""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """For the folder."""
        ...


def sample_positions(batch: Batch, share: float, chance: torch.Generator, ahead: int = 0) -> torch.Tensor:
    """A share of the written places, at random; none whose example target_weights less than `ahead` places on."""
    at = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    judged = batch.written & (at + ahead < batch.lengths[:, None])
    return judged & (torch.rand(judged.shape, generator=chance).to(judged.device) < share)


def cross_entropy(target: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of what was found under the target's own distribution, from both's logits."""
    wanted = torch.softmax(target.float(), dim=-1)
    return -(wanted * torch.log_softmax(found.float(), dim=-1)).sum(dim=-1).mean()


def greedy_targets(target_weights: EmbeddingsAndHead, batch: Batch) -> torch.Tensor:
    """What the target goes on with after each place, greedily.  # [batch, places]"""
    every = torch.arange(target_weights.head.shape[0], device=batch.tokens.device)
    return target_weights.logits(batch.wanted, every).argmax(dim=-1)


def accepted_lengths(right: Sequence[torch.Tensor], written: torch.Tensor) -> torch.Tensor:
    """`right[k]`: whether, at the place where it is made, guess k of a chain holds. A chain's guess k is made k places
    after the chain begins. How many hold, for the chain that begins at each written place; −1 at the others."""
    held = torch.where(written, 0, -1)
    still = written
    for k, made in enumerate(right):
        moved = made & written
        if k:
            moved = torch.cat([moved[:, k:], moved.new_zeros(len(moved), k)], dim=1)
        still = still & moved
        held = held + still.int()
    return held


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
