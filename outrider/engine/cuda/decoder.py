"""The forward pass of a model spec over keys and values in blocks: products in torch, attention in Triton.

All sessions of a step share the products with the weights. Attention reads keys and values where they are. Nothing here
waits for the device or reads a number from it, so a CUDA graph can capture all of it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from outrider.engine.cuda.step_inputs import StepInputs
from outrider.engine.model_spec import Cosines, Layer, Linear, ModelSpec, Norm, UnsupportedModel
from outrider.speculation.noise import to_device


@functools.cache
def _kernels() -> Any:
    """Import the launchers of kernels. The module needs Triton at import."""
    try:
        return importlib.import_module("outrider.engine.cuda.attention")
    except ImportError as error:
        raise UnsupportedModel(f"its kernels need Triton: {error}") from error


class Decoder:
    """The forward pass and its KV cache. Rotations are computed for `positions` positions."""

    def __init__(self, spec: ModelSpec, slots: int, positions: int) -> None:
        weight = spec.head.weight
        self._spec = spec
        self._layers = [_TorchLayer(layer, weight.dtype) for layer in spec.layers]
        self._final = _TorchNorm(spec.final, weight.dtype)
        self._rotated = spec.rotated
        self._rotations = [_table(rotate, positions, spec.head_dim, weight) for rotate in spec.rotations]
        size = (len(spec.layers), 2 * spec.kv_heads, slots, spec.head_dim)
        self._cache = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        # Tokens whose embedding is not finite:
        self._not_finite = torch.zeros(slots, dtype=torch.uint8, device=weight.device)
        windows = [layer.window for layer in spec.layers]
        self._widest = windows.index(None if None in windows else max(filter(None, windows)))

    def run(
        self, inputs: StepInputs, tokens: int, outputs: int, layers: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        """Run the first `tokens` of the inputs. Write logits of the first outputs, as many as there is room for.

        Return hidden states of the first `outputs`, final and after `layers`. An embedding that is not finite is
        computed as zeros: a NaN in a block would reach tokens that do not attend to it. Outputs that do are NaN.
        """
        spec = self._spec
        chosen = inputs.outputs[:outputs]
        x = spec.embed(inputs.ids[:tokens], inputs.positions[:tokens])
        finite = torch.linalg.vector_norm(x, float("inf"), dim=1) < float("inf")
        x = torch.where(finite[:, None], x, 0)
        self._not_finite.index_copy_(0, inputs.slots[:tokens], (~finite).view(torch.uint8))
        queries = x.new_empty((tokens, spec.heads, spec.head_dim))
        attended = torch.empty_like(queries)
        reached = torch.empty(tokens, dtype=torch.int32, device=x.device)
        states: list[torch.Tensor] = []
        for index, layer in enumerate(self._layers):
            of = layer.spec
            read = layer.attention_in(x)
            inner = self._up(of, layer.mlp_in(x) if of.mlp_in else read) if spec.parallel else None
            qkv = self._normed(layer, _product(of.qkv, read).view(tokens, -1, spec.head_dim))
            cache, kernels = self._cache[index], _kernels()
            rotation = None if of.rope is None else self._rotations[of.rope]
            kernels.place(qkv, queries, cache, inputs, rotation, self._rotated)
            flags = self._not_finite if index == self._widest else None
            kernels.attend(queries, cache, inputs, attended, of.scale, spec.softcap, of.window, flags, reached)
            _add(x, of.out, attended.view(tokens, -1), layer.attention_out)
            if inner is None:
                inner = self._up(of, layer.mlp_in(x))
            _add(x, of.down, inner, layer.mlp_out)
            if index + 1 in layers:
                states.append(x.index_select(0, chosen))
        bad = reached.index_select(0, chosen)[:, None] > 0
        final = self._final(x.index_select(0, chosen)).masked_fill_(bad, float("nan"))
        torch.mm(final[: len(logits)], spec.head.weight.T, out=logits)
        if spec.head.bias is not None:
            logits.add_(spec.head.bias)
        if spec.logit_softcap:
            logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return torch.cat([final, *states], dim=1) if states else final

    def copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Copy keys and values from slots to slots."""
        source, target = to_device(torch.tensor([old, new]), self._cache.device)
        self._cache.index_copy_(2, target, self._cache.index_select(2, source))
        self._not_finite.index_copy_(0, target, self._not_finite.index_select(0, source))

    def _up(self, layer: Layer, read: torch.Tensor) -> torch.Tensor:
        inner = _product(layer.up, read)
        if not self._spec.gated:
            return _activated(inner, self._spec.activation)
        gate, up = inner.chunk(2, dim=-1)
        return _activated(gate, self._spec.activation).mul_(up)

    def _normed(self, layer: _TorchLayer, qkv: torch.Tensor) -> torch.Tensor:
        """Apply the norms of queries and keys, in place."""
        heads, keys = self._spec.heads, self._spec.heads + self._spec.kv_heads
        if layer.spec.query is not None:
            qkv[:, :heads] = layer.query(qkv[:, :heads])
        if layer.spec.key is not None:
            qkv[:, heads:keys] = layer.key(qkv[:, heads:keys])
        return qkv


class _TorchNorm:
    """A norm with statistics in float32. It runs in the model's format if its weight fits: one kernel, not three."""

    def __init__(self, norm: Norm | None, dtype: torch.dtype) -> None:
        self.spec = norm
        if norm is None:
            return
        parts = [part for part in (norm.weight, norm.bias) if part is not None]
        fits = all(torch.equal(part.to(dtype).float(), part) for part in parts)
        self._dtype = dtype if fits else torch.float32
        self._weight = norm.weight.to(self._dtype)
        self._bias = None if norm.bias is None else norm.bias.to(self._dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.spec
        if norm is None:
            return x
        read, width = x.to(self._dtype), self._weight.shape
        if norm.kind == "rms":
            return functional.rms_norm(read, width, self._weight, norm.eps).to(x.dtype)
        return functional.layer_norm(read, width, self._weight, self._bias, norm.eps).to(x.dtype)


class _TorchLayer:
    """A layer's spec with its norms."""

    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        self.spec = layer
        self.attention_in = _TorchNorm(layer.attention_in, dtype)
        self.mlp_in = _TorchNorm(layer.mlp_in, dtype)
        self.attention_out = _TorchNorm(layer.attention_out, dtype)
        self.mlp_out = _TorchNorm(layer.mlp_out, dtype)
        self.query = _TorchNorm(layer.query, dtype)
        self.key = _TorchNorm(layer.key, dtype)


def _product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _add(x: torch.Tensor, linear: Linear, read: torch.Tensor, norm: _TorchNorm) -> None:
    """Add a product to x, after the output norm if there is one."""
    if norm.spec is None and linear.bias is None:
        x.addmm_(read, linear.weight.T)
    else:
        x.add_(norm(_product(linear, read)))


def _activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _table(rotate: Callable[[torch.Tensor], Cosines], positions: int, dim: int, like: torch.Tensor) -> Cosines:
    """Return cosines and signed sines by position; 1 and 0 where a head is not rotated.  # [positions, dim] each"""
    cos, sin = rotate(torch.arange(positions, device=like.device))
    rotated = cos.shape[1]
    whole_cos, whole_sin = cos.new_ones(positions, dim), sin.new_zeros(positions, dim)
    whole_cos[:, :rotated] = cos
    whole_sin[:, :rotated] = sin
    whole_sin[:, : rotated // 2].neg_()
    return whole_cos.to(like.dtype), whole_sin.to(like.dtype)
