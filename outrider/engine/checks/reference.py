"""Reference logits: a model's own eager forward, one sequence at a time, without cache or batch.

Every engine is compared with them at start (`conformance`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.pytorch_utils import Conv1D

_PROBE_TOKENS = 3
# Releases of transformers before 5.20 have no layer class for layers without a cache.
_ATTENTION_STATE = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
_STATELESS = {"loss", "logits", "past_key_values", "hidden_states", "attentions", "router_logits", "aux_loss", "z_loss"}


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after every token.  # [tokens, vocab], float32"""
    with _eager(model):
        logits: torch.Tensor = model(_ids(model, tokens), use_cache=False).logits[0]
    return logits.float()


@torch.inference_mode()
def logits_with_far_token(model: PreTrainedModel, tokens: Sequence[int], position: int) -> torch.Tensor:
    """Return the same logits from a pass that also has a last token at a far position; no other token attends to it."""
    positions = torch.tensor([[*range(len(tokens)), position]], device=model.device)
    with _eager(model):
        logits: torch.Tensor = model(
            _ids(model, [*tokens, tokens[0]]),
            attention_mask=torch.ones_like(positions),
            position_ids=positions,
            use_cache=False,
        ).logits[0, :-1]
    return logits.float()


@torch.inference_mode()
def unsupported_state(model: PreTrainedModel) -> str | None:
    """Return a description of the state that a model carries besides keys and values of plain attention; None: nothing.

    Only keys and values of plain attention can be rolled back with their tokens.
    """
    with _eager(model):
        output = model(_ids(model, [0] * _PROBE_TOKENS), use_cache=True)
    others = sorted(set(output.keys()) - _STATELESS)
    if others:
        return f"it answers with {', '.join(others)} besides logits"
    cache = output.get("past_key_values")
    if cache is None:
        return "it shows no cache of keys and values"
    if type(cache) is not DynamicCache:
        return f"it keeps a {type(cache).__name__}"
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _ATTENTION_STATE:
            return f"layer {index} keeps a {type(layer).__name__}"
    return None


@contextlib.contextmanager
def weights_in_format(model: PreTrainedModel, weights: str) -> Iterator[None]:
    """Run the model with the weights as an engine reads them, in float32 arithmetic. Embeddings stay as they are."""
    handles = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            handles.append(module.register_forward_hook(_in_float32))
        elif next(module.parameters(recurse=False), None) is not None:
            swap = _ConvertedParameters(weights == "int8" and isinstance(module, (nn.Linear, Conv1D)))
            handles += [
                module.register_forward_pre_hook(swap.convert),
                module.register_forward_hook(swap.restore, always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _ConvertedParameters:
    """A module's converted parameters while it runs: one module's copy at a time."""

    def __init__(self, int8: bool) -> None:
        self._int8 = int8
        self._own: dict[str, nn.Parameter] = {}

    def convert(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._own = dict(module.named_parameters(recurse=False))
        for name, own in self._own.items():
            value = own.detach()
            value = value.float() if value.is_floating_point() else value
            if self._int8 and name == "weight":
                value = round_to_int8(value.T).T if isinstance(module, Conv1D) else round_to_int8(value)
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def restore(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for name, own in self._own.items():
            setattr(module, name, own)
        self._own = {}


def round_to_int8(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [outputs, inputs] rounded to 255 levels per output."""
    scales = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / 127
    return (weight / scales).round_() * scales


def _in_float32(_module: nn.Module, _inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.float()


@contextlib.contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation  # noqa: SLF001 - there is no other way to ask
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _ids(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)], device=model.device)
