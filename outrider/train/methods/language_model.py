"""Training of drafters that are language models: early exits of the target, and small distilled models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.protocol.errors import StartupError
from outrider.train.methods.interface import Batch, TrainingInputs, accepted_guesses, cross_entropy, sample_positions

_DEPTH = 5  # of held-out chains


class LanguageMethod:
    """A model whose head is cut to `ids`."""

    def __init__(self, model: PreTrainedModel, inputs: TrainingInputs, shape: Mapping[str, Any]) -> None:
        self.module = model
        self.shape = shape
        self._target_weights, self._ids = inputs.target_weights, inputs.ids
        self._drafted = self._target_weights.cut(self._ids)
        head: Any = model.get_output_embeddings()
        self._own_head = head.weight.requires_grad  # else the target's

    def loss(self, batch: Batch, generator: torch.Generator, done: float) -> torch.Tensor:
        chosen = sample_positions(batch, generator)
        return cross_entropy(self._drafted.probs(batch.wanted[chosen]), self._logits(self._states(batch)[chosen]))

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        guesses = self._ids[self._logits(self._states(batch)).argmax(dim=-1)]
        return accepted_guesses([guesses] * _DEPTH, self._target_weights, batch)

    def weights(self) -> dict[str, torch.Tensor]:
        parameters = self.module.named_parameters()
        own = {name: weight.detach().to(torch.bfloat16) for name, weight in parameters if weight.requires_grad}
        return own | {"ids": self._ids.to(torch.int32)}

    def _states(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states after each position's token.  # [batch, places, width]"""
        ids = torch.cat([batch.first[:, None], batch.tokens], dim=1)
        states: torch.Tensor = self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states[:, 1:]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        if not self._own_head:
            return self._drafted.logits(states.to(self._drafted.head), slice(None))
        head: Any = self.module.get_output_embeddings()
        own: torch.Tensor = states @ head.weight[self._ids].to(states.dtype).T
        return own


def early_exit(inputs: TrainingInputs, *, exit_layers: int, layers: int) -> LanguageMethod:
    """Return the method for the target's first layers and a few trained ones, which begin as copies of its last."""
    target = shortened(inputs.target, exit_layers=exit_layers, layers=layers)
    return LanguageMethod(target, inputs, {"exit_layers": exit_layers, "layers": layers})


def shortened(target: PreTrainedModel, *, exit_layers: int, layers: int) -> PreTrainedModel:
    """Return a target cut to an early exit; raise StartupError for one that has none."""
    body: Any = target.base_model
    own_layers = getattr(body, "layers", None)
    if own_layers is None or getattr(body, "norm", None) is None:
        raise StartupError(f"no early exit: {type(target).__name__} has no layers or final norm where expected")
    if exit_layers + layers > len(own_layers):
        limit = f"at most {len(own_layers) - layers} beside {layers} trained ones"
        raise StartupError.of("exit_layers", exit_layers, limit)
    config = target.config.get_text_config()
    config.num_hidden_layers = exit_layers + layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: exit_layers + layers]
    body.layers = own_layers[:exit_layers]
    for index, last in enumerate(own_layers[-layers:], exit_layers):
        layer = type(own_layers[index])(config, index)  # its window and rotation are those of its place, as served
        try:
            layer.load_state_dict(last.state_dict())
        except RuntimeError as error:
            message = f"its last layers have other weights than layer {index + 1}"
            raise StartupError.of("exit_layers", exit_layers, "another number", f": {message}") from error
        body.layers.append(layer)
    target.requires_grad_(requires_grad=False)
    for part in (*body.layers[exit_layers:], body.norm):
        part.requires_grad_(requires_grad=True)
    return target


def distilled(inputs: TrainingInputs, *, hidden: int, layers: int) -> LanguageMethod:
    """Return the method for a small Llama with the target's vocabulary and embeddings, projected to its width."""
    target, target_weights = inputs.target, inputs.target_weights
    target_config = target.config.get_text_config()
    config = LlamaConfig(
        vocab_size=target_weights.embeddings.shape[0],
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=int(getattr(target_config, "max_position_embeddings", 2048)),
        tie_word_embeddings=True,
        bos_token_id=target_config.bos_token_id,
        eos_token_id=target.generation_config.eos_token_id if target.generation_config else target_config.eos_token_id,
        pad_token_id=None,
    )
    student = LlamaForCausalLM(config)
    with torch.no_grad():
        table = target_weights.embeddings.float()
        kept = min(hidden, *table.shape)
        directions = torch.pca_lowrank(table, q=kept, niter=2)[2]
        embeddings: Any = student.get_input_embeddings()
        embeddings.weight[:, :kept] = (table - table.mean(dim=0)) @ directions
    return LanguageMethod(student, inputs, {"hidden": hidden, "layers": layers})
