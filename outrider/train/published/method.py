"""Training of EAGLE-3: the layers learn the target's next-token distribution, on their own outputs too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.protocol.errors import StartupError
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.data import Example
from outrider.train.methods.interface import Batch, accepted_lengths, greedy_targets, sample_positions
from outrider.train.published.checkpoint import MODEL, published_weights, save_config
from outrider.train.published.eagle3 import Eagle3, Eagle3Shape, frozen_head_loss

__all__ = ["EAGLE3", "MODEL", "Eagle3Method", "state_layers"]

EAGLE3 = "eagle3"
_NEXT_STEP_WEIGHT = 0.8  # of the loss, relative to the step before
_DEPTH = 5  # of held-out chains
_ONE_STEP_SHARE = 0.4  # of the training; later steps build on the first one
_FITTED_POSITIONS = 50_000
_RIDGE = 1e-3
_FEW_LAYERS = 6
_ADDED = ("o_proj.weight", "down_proj.weight")  # what a layer adds to the residual


def state_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose states are read: an early one, the middle and a late one, if the target has three."""
    if not num_layers:
        raise StartupError(
            "eagle3 needs hidden states of single layers, which this target does not give", field="target"
        )
    late = num_layers - 3 if num_layers > _FEW_LAYERS else num_layers
    return tuple(sorted({min(2, num_layers), max(1, num_layers // 2), late}))


class Eagle3Method:
    """The training of an EAGLE-3 drafter."""

    def __init__(
        self,
        target: PreTrainedModel,
        target_weights: EmbeddingsAndHead,
        ids: torch.Tensor,
        examples: Sequence[Example],
        *,
        layers: int,
        steps: int,
    ) -> None:
        config = target.config.get_text_config()
        heads = config.num_attention_heads
        shape = Eagle3Shape(
            hidden=config.hidden_size,
            inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            states=state_layers(config.num_hidden_layers),
            layers=layers,
            rope_theta=float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)),
            context=int(getattr(config, "max_position_embeddings", 8192)),
        )
        self._target_config = config
        self.module = Eagle3(shape, ids, target_weights)
        self.shape = asdict(shape) | {"states": list(shape.states)}
        self._target_weights = target_weights
        self._drafted = target_weights.cut(ids)
        self._steps = steps
        _begin(self.module, target_weights, examples)

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
        true = greedy_targets(self._target_weights, batch)
        outputs = self.module.unroll(batch.layer_states, batch.tokens, batch.starts, batch.lengths)
        head = self._drafted.head
        guesses = [self.module.ids[(out.to(head.dtype) @ head.T).argmax(dim=-1)] for out in islice(outputs, _DEPTH)]
        return accepted_lengths([guess == true for guess in guesses], batch.written)

    def weights(self) -> dict[str, torch.Tensor]:
        return published_weights(self.module, self._target_weights.head)

    def save_config(self, folder: Path, target: str) -> None:
        """Write the configuration beside the weights."""
        save_config(folder, self.module, target, self._target_config)


@torch.no_grad()
def _begin(module: Eagle3, target_weights: EmbeddingsAndHead, examples: Sequence[Example]) -> None:
    """Begin with the linear map from the states to the final state after the next token; the layers add nothing yet."""
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
    for name, weight in module.layers.named_parameters():
        if name.endswith(_ADDED):
            weight.zero_()
