"""Hooks that catch hidden states of a transformers model: the input of its head, and the outputs of single layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel


class StateHooks:
    """The hidden states of one forward pass at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._final = torch.empty(0)
        self._states: dict[int, torch.Tensor] = {}  # by number of layers, of all tokens of a step
        self.catch((), None)
        model.get_output_embeddings().register_forward_pre_hook(self._catch_final)
        decoder: Any = model.get_decoder()
        layers: Any = getattr(decoder, "layers", None) or getattr(decoder, "h", ())
        config = model.config.get_text_config()
        # Else they have another name, or several streams as those of Gemma 3n: they are not captured.
        found = len(layers) == config.num_hidden_layers and not hasattr(config, "altup_num_inputs")
        self.shape = (len(layers), int(config.hidden_size)) if found else (0, 0)
        for number, layer in enumerate(layers if found else (), 1):
            layer.register_forward_hook(partial(self._catch, number))

    def catch(self, layers: Sequence[int], num_logits: int | None) -> None:
        """Catch the states after these layers. The head gets its first `num_logits` rows only; None: all."""
        self._layers, self._num_logits = layers, num_logits

    def take(self, layers: Sequence[int], outputs: torch.Tensor, *, selected: bool) -> torch.Tensor:
        """Return the states of these tokens, which are `selected` already where the head reads no others."""
        final = self._final[0] if selected else self._final[0, outputs]
        return torch.cat([final, *(self._states.pop(layer)[outputs] for layer in layers)], dim=1) if layers else final

    def _catch_final(self, _module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._final = inputs[0]
        return (inputs[0][:, : self._num_logits], *inputs[1:])

    def _catch(self, number: int, _module: Any, _inputs: Any, output: Any) -> None:
        if number in self._layers:
            self._states[number] = (output[0] if isinstance(output, tuple) else output)[0]
