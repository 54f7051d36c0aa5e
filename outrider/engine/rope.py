"""Rotations (RoPE) that change for all positions once a step passes some length: longrope and dynamic scaling.

Transformers chooses their frequencies by the longest position of a step.
Here a step holds many sessions, and guesses besides, so a neighbour or a
guess would decide how a session's keys are turned. Such a model is served up
to the length at which its rotation changes, with the rotation that it has
until there.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

BEYOND = 1024  # guesses may look past the end of the context by less than this


def hold_rotations(model: PreTrainedModel, context: int) -> int:
    """Make each row's rotation depend on its own position only; the length up to which that changes nothing."""
    limit = context
    for module in list(model.modules()):
        if not _is_rotary(module):
            continue
        length = min((_steady_length(module, kind, context + BEYOND) for kind in _kinds(module)), default=context)
        if length < context + BEYOND:
            limit = min(limit, length)
            module.forward = _held(module.forward, length - 1)
    return limit


def _is_rotary(module: torch.nn.Module) -> bool:
    if not any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
        return False
    return "position_ids" in inspect.signature(module.forward).parameters


def _kinds(module: torch.nn.Module) -> Iterator[dict[str, str]]:
    """What a rotation is asked by besides positions: a kind of layer, where there are several."""
    types = getattr(module, "rope_type", None)
    if isinstance(types, dict):
        yield from ({"layer_type": kind} for kind in types)
    else:
        yield {}


def _steady_length(module: torch.nn.Module, kind: dict[str, str], most: int) -> int:
    """The longest step, up to `most` tokens, that turns its second token as a step of two tokens does."""
    probed = copy.deepcopy(module)  # the frequencies that it used last are part of its state
    like = torch.empty(0, device=next(module.buffers(recurse=False)).device)

    def turned(last: int) -> list[torch.Tensor]:
        found = probed(like, torch.tensor([[1, last]], device=like.device), **kind)
        return [part[:, :1].clone() for part in (found if isinstance(found, tuple) else (found,))]

    def is_steady(length: int) -> bool:
        alone, beside = turned(1), turned(length - 1)
        return all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))

    with torch.inference_mode(False), torch.no_grad():
        if is_steady(most):
            return most
        steady, changed = 2, most
        while changed - steady > 1:
            middle = (steady + changed) // 2
            steady, changed = (middle, changed) if is_steady(middle) else (steady, middle)
        return steady


def _held(forward: Callable[..., Any], last: int) -> Callable[..., Any]:
    return partial(_forward_held, forward, last)


def _forward_held(
    forward: Callable[..., Any], last: int, x: torch.Tensor, position_ids: torch.Tensor, *kind: Any, **named: Any
) -> Any:
    """Rows past the last position are guesses that can never be committed: the context ends before them."""
    return forward(x, position_ids.clamp(max=last), *kind, **named)
