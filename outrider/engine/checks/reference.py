"""What a model answers by itself: its own eager forward, one sequence at a time, without cache or batch.

Everything that runs a model is held against this at start (`conformity`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.pytorch_utils import Conv1D

_PROBE_TOKENS = 3
_ATTENTION_STATE = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
_STATELESS = {"loss", "logits", "past_key_values", "hidden_states", "attentions", "router_logits", "aux_loss", "z_loss"}


@torch.inference_mode()
def truth(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after every token.  # [tokens, vocab], float32"""
    with _eagerly(model):
        logits: torch.Tensor = model(_ids(model, tokens), use_cache=False).logits[0]
    return logits.float()


@torch.inference_mode()
def beside_a_far_row(model: PreTrainedModel, tokens: Sequence[int], position: int) -> torch.Tensor:
    """The same from a pass whose last row, which no other sees, is at a far position."""
    positions = torch.tensor([[*range(len(tokens)), position]], device=model.device)
    with _eagerly(model):
        logits: torch.Tensor = model(
            _ids(model, [*tokens, tokens[0]]),
            attention_mask=torch.ones_like(positions),
            position_ids=positions,
            use_cache=False,
        ).logits[0, :-1]
    return logits.float()


@torch.inference_mode()
def unknown_state(model: PreTrainedModel) -> str | None:
    """What a model may keep from token to token besides keys and values of plain attention, which are all that is known
    to come and go with tokens. None: nothing."""
    with _eagerly(model):
        given = model(_ids(model, [0] * _PROBE_TOKENS), use_cache=True)
    others = sorted(set(given.keys()) - _STATELESS)
    if others:
        return f"it answers with {', '.join(others)} besides logits"
    kept = given.get("past_key_values")
    if kept is None:
        return "it shows no cache of keys and values"
    if type(kept) is not DynamicCache:
        return f"it keeps a {type(kept).__name__}"
    for index, layer in enumerate(kept.layers):
        if type(layer) not in _ATTENTION_STATE:
            return f"layer {index} keeps a {type(layer).__name__}"
    return None


@contextlib.contextmanager
def weights_read_as(model: PreTrainedModel, weights: str) -> Iterator[None]:
    """The model with the weights that an engine reads, in float32 arithmetic. Embeddings stay as they are."""
    handles = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            handles.append(module.register_forward_hook(_in_float32))
        elif next(module.parameters(recurse=False), None) is not None:
            swap = _Swap(weights == "int8" and isinstance(module, (nn.Linear, Conv1D)))
            handles += [
                module.register_forward_pre_hook(swap.read),
                module.register_forward_hook(swap.put_back, always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Swap:
    """A module's parameters as they are read, while it runs: one copy at a time."""

    def __init__(self, in_bytes: bool) -> None:
        self._in_bytes = in_bytes
        self._own: dict[str, nn.Parameter] = {}

    def read(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._own = dict(module.named_parameters(recurse=False))
        for name, own in self._own.items():
            value = own.detach()
            value = value.float() if value.is_floating_point() else value
            if self._in_bytes and name == "weight":
                value = in_bytes(value.T).T if isinstance(module, Conv1D) else in_bytes(value)
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def put_back(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for name, own in self._own.items():
            setattr(module, name, own)
        self._own = {}


def in_bytes(weight: torch.Tensor) -> torch.Tensor:
    """A weight [outputs, inputs] rounded to 255 levels per output."""
    scales = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / 127
    return (weight / scales).round_() * scales


def _in_float32(_module: nn.Module, _inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.float()


@contextlib.contextmanager
def _eagerly(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation  # noqa: SLF001 - there is no other way to ask
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _ids(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)], device=model.device)
