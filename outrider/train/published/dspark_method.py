"""Training of DSpark: each block learns the target's distributions at its places, and how likely they accept it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch.nn import functional

from outrider.train.data import Example
from outrider.train.methods.interface import Batch, TrainingInputs, accepted_lengths, greedy_targets
from outrider.train.published.checkpoint import TrainedCheckpoint
from outrider.train.published.dspark import Dspark, DsparkShape

# The published weights of the loss: cross-entropy, distance of the distributions, and decay along a block.
_CROSS_ENTROPY, _DISTANCE, _DECAY = 0.1, 0.9, 4.0
_MAX_RANK = 256
_MEASURED = 64  # blocks of one pass over held-out texts
_SIZED = 64  # texts


class DsparkMethod(TrainedCheckpoint):
    """The training of a DSpark drafter."""

    module: Dspark

    def __init__(self, inputs: TrainingInputs, *, layers: int, block: int, markov: str = "vanilla") -> None:
        hidden, vocab = inputs.target_weights.hidden, len(inputs.target_weights.embeddings)
        used = {token for example in inputs.examples for token in example.tokens.tolist()}
        shape = DsparkShape(
            **self.dimensions(inputs.target),
            layers=layers,
            block=block,
            markov=markov,
            rank=min(_MAX_RANK, max(1, hidden // 4)),
            mask=next((token for token in reversed(range(vocab)) if token not in used), vocab - 1),
        )
        super().__init__(inputs, Dspark(shape, inputs.ids, inputs.target_weights))
        _begin(self.module, inputs.examples)

    def loss(self, batch: Batch, generator: torch.Generator, done: float) -> torch.Tensor:
        first, count = batch.outputs[:, None], (batch.lengths - batch.outputs).clamp(min=1)[:, None]
        blocks = max(1, batch.tokens.shape[1] // self.module.shape.block)
        drawn = torch.rand(len(first), blocks, generator=generator).to(first.device)
        logits, confidence, at = self._guesses(batch, first + (drawn * count).long())
        valid = at < batch.lengths[:, None, None]
        weights = torch.exp(-torch.arange(at.shape[-1], device=at.device) / _DECAY).expand_as(at)[valid]
        probs = self._drafted.probs(_rows(batch.wanted, at)[valid])
        own = torch.log_softmax(logits[valid], dim=-1)
        distance = (own.exp() - probs).abs().sum(dim=-1)
        accepted = 1 - distance.detach() / 2
        missed = functional.binary_cross_entropy_with_logits(confidence[valid], accepted, reduction="none")
        total = _DISTANCE * distance - _CROSS_ENTROPY * torch.linalg.vecdot(probs, own) + missed
        loss: torch.Tensor = (weights * total).sum() / weights.sum()
        return loss

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Guess after every position. The token before a guess is the text's: a chain ends where they differ."""
        true, places = greedy_targets(self._target_weights, batch), batch.tokens.shape[1]
        right = torch.zeros(self.module.shape.block, *true.shape, dtype=torch.bool, device=true.device)
        for first in range(0, places, _MEASURED):
            anchors = torch.arange(first, min(places, first + _MEASURED), device=true.device).expand(len(true), -1)
            logits, _, at = self._guesses(batch, anchors)
            found = self.module.ids[logits.argmax(dim=-1)] == _rows(true, at)
            for place, made in enumerate(right):
                width = max(0, min(anchors.shape[1], places - first - place))
                made[:, first + place : first + place + width] = found[:, :width, place]
        return accepted_lengths(list(right), batch.written)

    def _guesses(self, batch: Batch, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits and confidence of the guesses of blocks, and the position of the token before each guess."""
        ahead = torch.arange(self.module.shape.block, device=anchors.device)
        at = anchors[..., None] + ahead
        hidden = self.module(batch.layer_states, _rows(batch.tokens, anchors), anchors, batch.starts)
        bias, confidence = self.module.beside(hidden, _rows(batch.tokens, at))
        head = self._drafted.head
        return (hidden.to(head.dtype) @ head.T).float() + bias.float(), confidence, at


def _rows(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the values at positions of each text; beyond its end the last one.  # [batch, ...]"""
    text = torch.arange(len(values), device=at.device).view(-1, *[1] * (at.dim() - 1))
    return values[text, at.clamp(max=values.shape[1] - 1)]


@torch.no_grad()
def _begin(module: Dspark, examples: Sequence[Example]) -> None:
    """Begin with outputs of the size of the target's states; the Markov head adds nothing yet."""
    final = torch.cat([example.hidden_states.float() for example in islice(examples, _SIZED)])
    module.norm.weight.fill_(float(final.pow(2).mean().sqrt()))
    module.markov_head.markov_w2.weight.zero_()
