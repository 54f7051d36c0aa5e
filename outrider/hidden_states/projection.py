"""Projection of a token's hidden states after several layers to the one vector that a drafter reads.

It is sent as a safetensors file, which holds plain numbers only, and is named by the SHA-256 of that file. Its tensors
have the names of published drafters, and apply in this order:

    input_norm.weight    [inputs]          RMS norm of all states together
    fc_norm.I.weight     [inputs / count]  RMS norm of the I-th state; all or none
    fc.weight, fc.bias   [width, inputs]   the linear map; the bias may be absent
    hidden_norm.weight   [width]           RMS norm of the result

    eps                  [1]               of the norms

Inputs are the states joined in the order of the drafter's StateSpec.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.nn import functional

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.hidden_states.messages import MAX_HIDDEN_WIDTH, StateSpec

MAX_BYTES = 1 << 30  # of a projection: five states of width 8192 to one take 0.7 GB in bfloat16
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_FC, _BIAS, _BEFORE, _AFTER, _EPS = "fc.weight", "fc.bias", "input_norm.weight", "hidden_norm.weight", "eps"


class PackedProjection:
    """A projection as a drafter offers it: its bytes, and the spec that names them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], eps: float, layers: Sequence[int]) -> None:
        """Pack weights under the names above; `layers` are the states that they read."""
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        self.data = save(tensors | {_EPS: torch.tensor([eps], dtype=torch.float32)})
        self.spec = StateSpec(tuple(layers), hashlib.sha256(self.data).hexdigest(), len(weights[_FC]))


class Projection:
    """A projection whose weights have been checked."""

    def __init__(self, data: bytes, num_states: int, state_width: int, device: torch.device) -> None:
        """Read the bytes of a projection from `num_states` states. Raise InvalidRequest if anything does not fit."""
        weights = _read(data)
        self.width = _check(weights, num_states, state_width)
        kept = torch.float32 if device.type == "cpu" else weights[_FC].dtype
        self._weights = {name: weight.to(device, kept) for name, weight in weights.items()}
        self.num_bytes = sum(weight.nbytes for weight in self._weights.values())
        self._eps = float(weights[_EPS])
        self.num_states = num_states
        self.used_at = float("-inf")  # monotonic time of the last step with it

    @torch.inference_mode()
    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the vectors for rows of joined states.  # [tokens, states x width] to [tokens, width]"""
        weights = self._weights
        states = states.to(weights[_FC].dtype)
        if _BEFORE in weights:
            states = self._norm(states, _BEFORE)
        elif _each(0) in weights:
            parts = states.chunk(self.num_states, dim=-1)
            states = torch.cat([self._norm(part, _each(i)) for i, part in enumerate(parts)], dim=-1)
        projected = functional.linear(states, weights[_FC], weights.get(_BIAS))
        return self._norm(projected, _AFTER) if _AFTER in weights else projected

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return functional.rms_norm(states, weight.shape, weight, self._eps)


def _each(state: int) -> str:
    return f"fc_norm.{state}.weight"


def _read(data: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _refused("data", f"unreadable: {error}", "a safetensors file") from error


def _check(weights: Mapping[str, torch.Tensor], num_states: int, state_width: int) -> int:
    """Check names, kinds, shapes and values; return the width of the result."""
    inputs = num_states * state_width
    width = next(iter(weights[_FC].shape), 0) if _FC in weights else 0
    if not 1 <= width <= MAX_HIDDEN_WIDTH:
        raise _refused(_FC, width, f"1 to {MAX_HIDDEN_WIDTH} rows")
    shapes = {_FC: (width, inputs), _BIAS: (width,), _BEFORE: (inputs,), _AFTER: (width,), _EPS: (1,)}
    shapes |= {_each(state): (state_width,) for state in range(num_states)}
    for name, weight in weights.items():
        if name not in shapes:
            raise _refused(name, "given", f"one of {', '.join(shapes)}")
        if tuple(weight.shape) != shapes[name]:
            raise _refused(name, f"of shape {list(weight.shape)}", f"of shape {list(shapes[name])} for this target")
        if weight.dtype not in _NUMBERS:
            raise _refused(name, str(weight.dtype), ", ".join(map(str, _NUMBERS)))
        if not bool(torch.isfinite(weight).all()):
            raise _refused(name, "NaN or infinite in places", "finite")
    each = [_each(state) in weights for state in range(num_states)]
    if _EPS not in weights or any(each) != all(each) or (any(each) and _BEFORE in weights):
        raise _refused("names", ", ".join(sorted(weights)), "eps, and all fc_norm or input_norm or neither")
    if not 0 < float(weights[_EPS]) < 1:
        raise _refused(_EPS, float(weights[_EPS]), "in (0, 1)")
    return width


def _refused(name: str, value: object, limit: str) -> InvalidRequest:
    return InvalidRequest.of(f"projection.{name}", value, limit)
