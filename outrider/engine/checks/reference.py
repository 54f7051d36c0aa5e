"""Reference logits: a model's own eager forward of one sequence, without a cache. Engines must agree with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.pytorch_utils import Conv1D

from outrider.engine.model_spec import head_format
from outrider.models.in_place import replace_while_running

_PROBE_TOKENS = 3
# Releases of transformers before 5.20 have no layer class for layers without a cache.
_ATTENTION_STATE = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
_STATELESS = {"loss", "logits", "past_key_values", "hidden_states", "attentions", "router_logits", "aux_loss", "z_loss"}


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: Sequence[int], far: int | None = None) -> torch.Tensor:
    """Return the logits after every token.  # [tokens, vocab], float32

    With `far`, the pass has one more token, at this position; no other token attends to it.
    """
    ids, options = [*tokens], dict[str, Any](use_cache=False)
    if far is not None:
        ids, positions = [*tokens, tokens[0]], torch.tensor([[*range(len(tokens)), far]], device=model.device)
        options |= {"attention_mask": torch.ones_like(positions), "position_ids": positions}
    with _eager(model):
        logits: torch.Tensor = model(torch.tensor([ids], device=model.device), **options).logits[0, : len(tokens)]
    return logits.float()


@torch.inference_mode()
def unsupported_state(model: PreTrainedModel) -> str | None:
    """Return a description of the state that a model carries besides keys and values of plain attention; None: nothing.

    Only keys and values of plain attention can be rolled back with their tokens.
    """
    with _eager(model):
        output = model(torch.tensor([[0] * _PROBE_TOKENS], device=model.device), use_cache=True)
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
            handles.append(module.register_forward_hook(lambda _, __, output: output.float()))
        elif next(module.parameters(recurse=False), None) is not None:
            own = head_format(weights) if module is model.get_output_embeddings() else weights
            handles += replace_while_running(module, partial(_converted, module, own))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _converted(module: nn.Module, weights: str, _: Any) -> dict[str, torch.Tensor]:
    """Return a module's parameters in float32, and its weight with the format's rounding."""
    own = module.named_parameters(recurse=False)
    made = {name: value.detach().float() if value.is_floating_point() else value.detach() for name, value in own}
    rounded = {"int8": round_to_int8, "int4": round_to_int4}.get(weights)
    if rounded and isinstance(module, (nn.Linear, Conv1D)):
        weight = made["weight"]
        made["weight"] = rounded(weight.T).T if isinstance(module, Conv1D) else rounded(weight)
    return made


def round_to_int8(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [outputs, inputs] rounded to 255 levels per output."""
    scales = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / 127
    return (weight / scales).round_() * scales


def round_to_int4(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [outputs, inputs] rounded to 16 levels per 32 inputs, from their least to their largest."""
    rounded = []
    for block in torch.split(weight, 32, dim=1):
        lowest, highest = block.amin(dim=1, keepdim=True), block.amax(dim=1, keepdim=True)
        scale, lowest = ((highest - lowest) / 15).half().float(), lowest.half().float()
        rounded.append(((block - lowest) / scale.where(scale > 0, torch.inf)).round_().clamp_(0, 15) * scale + lowest)
    return torch.cat(rounded, dim=1)


@contextlib.contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation  # noqa: SLF001 - there is no other way to ask
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
