"""Rotations (RoPE) that change for all positions once a step passes some length: longrope and dynamic scaling.

Transformers selects their frequencies by the longest position of a step. Here a step holds many sessions and guesses,
so another session or a guess would decide how a session's keys are rotated. Such a model is served up to the length at
which its rotation changes, with the rotation that it has until then.
"""

from __future__ import annotations

import copy
import inspect
from bisect import bisect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

BEYOND = 1024  # guesses reach past the end of the context by less than this


def fix_rotations(model: PreTrainedModel, context: int) -> int:
    """Make each token's rotation depend on its own position only. Return the length up to which nothing changes."""
    limit = context
    for module in filter(_is_rotary, list(model.modules())):
        types = getattr(module, "rope_type", None)
        kinds = [{"layer_type": kind} for kind in types] if isinstance(types, dict) else [{}]  # of layers
        length = min((_steady_length(module, kind, context + BEYOND) for kind in kinds), default=context)
        if length < context + BEYOND:
            limit = min(limit, length)
            module.forward = partial(_forward_clamped, module.forward, length - 1)
    return limit


def _is_rotary(module: torch.nn.Module) -> bool:
    rotates = any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
    return rotates and "position_ids" in inspect.signature(module.forward).parameters


def _steady_length(module: torch.nn.Module, kind: dict[str, str], most: int) -> int:
    """Return the longest step, up to `most` tokens, that rotates its second token as a step of two tokens does."""
    probe = copy.deepcopy(module)  # its last frequencies are part of its state
    like = torch.empty(0, device=next(module.buffers(recurse=False)).device)

    def rotation(last: int) -> list[torch.Tensor]:
        result = probe(like, torch.tensor([[1, last]], device=like.device), **kind)
        return [part[:, :1].clone() for part in (result if isinstance(result, tuple) else (result,))]

    def is_steady(length: int) -> bool:
        short, long = rotation(1), rotation(length - 1)
        return all(torch.equal(one, other) for one, other in zip(short, long, strict=True))

    with torch.inference_mode(False), torch.no_grad():
        if is_steady(most):  # as nearly all are
            return most
        return 2 + bisect(range(3, most), False, key=lambda length: not is_steady(length))


def _forward_clamped(
    forward: Callable[..., Any], last: int, x: torch.Tensor, position_ids: torch.Tensor, *kind: Any, **named: Any
) -> Any:
    """Rotate with positions clamped: tokens beyond are guesses past the end of the context, never committed."""
    return forward(x, position_ids.clamp(max=last), *kind, **named)
