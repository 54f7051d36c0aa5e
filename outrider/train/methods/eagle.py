"""Training of EAGLE drafters: the layer learns the target's next-token distribution, some steps ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.train.artifacts.eagle import Eagle, EagleShape
from outrider.train.data import Example
from outrider.train.fit import best_linear
from outrider.train.methods.interface import Batch, TrainingInputs, accepted_guesses, cross_entropy, sample_positions

_STATE_WEIGHT = 0.1
_NEXT_STEP_WEIGHT = 0.9  # of the loss, relative to the step before
_DEPTH = 5  # of held-out chains
_ONE_STEP_SHARE = 0.6  # of the training; later steps build on the first one


class EagleMethod:
    """The training of an EAGLE drafter."""

    def __init__(self, inputs: TrainingInputs, *, layers: int, steps: int, start: Eagle | None = None) -> None:
        self._target_weights = inputs.target_weights
        self.module = start or Eagle(EagleShape.like(inputs.target, layers), inputs.ids, self._target_weights)
        if start is None:
            _begin(self.module, inputs.target, inputs.examples)
        self.shape = asdict(self.module.shape)
        self._drafted = self._target_weights.cut(self.module.ids)
        self._steps = steps

    def loss(self, batch: Batch, generator: torch.Generator, done: float) -> torch.Tensor:
        steps = self._steps if done >= _ONE_STEP_SHARE else 1
        outputs = self.module.unroll(batch.hidden_states, batch.tokens, batch.lengths, batch.starts, steps)
        total = torch.zeros(())
        chosen = sample_positions(batch, generator)
        chosen[:, : steps - 1] = False
        wanted = batch.wanted[chosen]
        probs = self._drafted.probs(wanted)
        for step, output in enumerate(outputs):
            found = output[chosen]
            missed = cross_entropy(probs, nn.functional.linear(found, self._drafted.head))
            distance = nn.functional.smooth_l1_loss(found.float(), wanted, reduction="sum") / max(1, wanted.numel())
            total = total + _NEXT_STEP_WEIGHT**step * (missed + _STATE_WEIGHT * distance)
        return total / sum(_NEXT_STEP_WEIGHT**step for step in range(steps))

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        outputs = self.module.unroll(batch.hidden_states, batch.tokens, batch.lengths, batch.starts, _DEPTH)
        guesses = [self.module.ids[self.module.head(output).argmax(dim=-1)] for output in outputs]
        return accepted_guesses(guesses, self._target_weights, batch)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.module.weights()


@torch.no_grad()
def _begin(eagle: Eagle, target: PreTrainedModel, examples: Sequence[Example]) -> None:
    """Initialise with the best result without a layer: the linear map from state and embedding to the next state.

    The layer adds nothing at first. If it has the shape of the target's layers, its attention begins as the last one's.
    """
    linear, size = best_linear(examples, eagle.embeddings, 1)
    eagle.mix.weight.copy_(linear)
    target_layers = list(getattr(target.base_model, "layers", ()))
    for mine, other in zip(reversed(eagle.body.model.layers), reversed(target_layers), strict=False):
        known = other.state_dict()
        if {name: w.shape for name, w in known.items()} == {name: w.shape for name, w in mine.state_dict().items()}:
            mine.load_state_dict({name: weight.float() for name, weight in known.items()})
    for layer in eagle.body.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    eagle.body.model.norm.weight.fill_(size)
