"""Training of EAGLE-3: the layers learn the target's next-token distribution, on their own outputs too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch.nn import functional

from outrider.train.data import Example
from outrider.train.methods.interface import Batch, TrainingInputs, accepted_guesses, sample_positions
from outrider.train.published.checkpoint import MODEL, TrainedCheckpoint, state_layers
from outrider.train.published.dspark_method import DsparkMethod
from outrider.train.published.eagle3 import Eagle3, Eagle3Shape, frozen_head_loss

__all__ = ["FORMATS", "MODEL", "DsparkMethod", "Eagle3Method", "TrainedCheckpoint", "state_layers"]

FORMATS = ("eagle3", "dspark")
_NEXT_STEP_WEIGHT = 0.8  # of the loss, relative to the step before
_DEPTH = 5  # of held-out chains
_ONE_STEP_SHARE = 0.4  # of the training; later steps build on the first one
_FITTED_POSITIONS = 50_000
_RIDGE = 1e-3


class Eagle3Method(TrainedCheckpoint):
    """The training of an EAGLE-3 drafter."""

    module: Eagle3

    def __init__(self, inputs: TrainingInputs, *, layers: int, steps: int) -> None:
        shape = Eagle3Shape(**self.dimensions(inputs.target), layers=layers)
        super().__init__(inputs, Eagle3(shape, inputs.ids, inputs.target_weights))
        self._steps = steps
        _begin(self.module, inputs.examples)

    def loss(self, batch: Batch, generator: torch.Generator, done: float) -> torch.Tensor:
        steps = self._steps if done >= _ONE_STEP_SHARE else 1
        outputs = self.module.unroll(batch.layer_states, batch.tokens, batch.starts, batch.lengths)
        chosen = sample_positions(batch, generator)
        chosen[:, : steps - 1] = False
        if not chosen.any():
            return 0.0 * next(iter(outputs)).sum()
        probs = self._drafted.probs(batch.wanted[chosen])
        total = torch.zeros((), device=batch.tokens.device)
        for step, output in enumerate(islice(outputs, steps)):
            missed = frozen_head_loss(output[chosen], self._drafted.head, probs)
            total = total + _NEXT_STEP_WEIGHT**step * missed
        return total / sum(_NEXT_STEP_WEIGHT**step for step in range(steps))

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        outputs = self.module.unroll(batch.layer_states, batch.tokens, batch.starts, batch.lengths)
        head = self._drafted.head
        guesses = [self.module.ids[(out.to(head.dtype) @ head.T).argmax(dim=-1)] for out in islice(outputs, _DEPTH)]
        return accepted_guesses(guesses, self._target_weights, batch)


@torch.no_grad()
def _begin(module: Eagle3, examples: Sequence[Example]) -> None:
    """Begin with the linear map from the states to the final state after the next token."""
    inputs, wanted, count = [], [], 0
    for example in examples:
        first = max(0, example.prompt_length - 2)
        states, final = example.layer_states[first:-1].float(), example.hidden_states[first + 1 :].float()
        parts = states.chunk(len(module.shape.states), dim=-1)
        inputs.append(torch.cat([functional.rms_norm(part, part.shape[-1:]) for part in parts], dim=-1))
        wanted.append(final)
        count += len(final)
        if count > _FITTED_POSITIONS:
            break
    x, y = torch.cat(inputs), torch.cat(wanted)
    size = float(y.pow(2).mean().sqrt())
    gram = x.T @ x + _RIDGE * len(x) * torch.eye(x.shape[1])
    module.fc.weight.copy_(torch.linalg.solve(gram, x.T @ y).T / size)
    module.norm.weight.fill_(size)
