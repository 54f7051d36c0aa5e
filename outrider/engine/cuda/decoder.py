"""The forward pass of a model spec in torch, over keys and values in blocks; `CudaGraphEngine` decides its shapes.

All sessions of a step share the products with the weights. Attention runs in groups: sessions of one padded shape, each
with its own block table. Nothing here waits for the device or reads a number from it, so a CUDA graph can capture all
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.engine.model_spec import Cosines, Layer, Linear, ModelSpec, Norm
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.speculation.noise import to_device

FEW_TOKENS = 64  # up to here a session's scores are materialised; more would not fit in memory
_SPLIT_TOKENS = 512  # of a context: shorter splits cost more than they gain
_SPLITS = 128  # about the number of processors of a large device


@dataclass(frozen=True, slots=True)
class SessionGroup:
    """Sessions of a step that attend together, padded to one shape.

    The step's tokens from `first` on belong to them, `tokens` to each. Padding
    attends to itself, so that no sum of weights is zero.
    """

    first: int
    sessions: int
    tokens: int
    table: torch.Tensor  # blocks of all sessions, concatenated  # [sessions · blocks]
    base: torch.Tensor  # number of tokens cached before  # [sessions]
    positions: torch.Tensor  # [sessions · tokens]
    mask: torch.Tensor  # which new tokens each new token attends to  # [sessions, tokens, tokens]

    @property
    def context(self) -> int:
        """Return the padded context of each session, in tokens."""
        return self.table.shape[0] // self.sessions * BLOCK_TOKENS

    @property
    def end(self) -> int:
        """Return the index after the last token."""
        return self.first + self.sessions * self.tokens

    def hidden(self, window: int | None) -> torch.Tensor:
        """Return which cached tokens each new token does not attend to.  # [sessions, tokens, context]"""
        index = torch.arange(self.context, device=self.table.device)
        new = index - self.base[:, None]  # [sessions, context]
        which = new.clamp(0, self.tokens - 1)
        wide = which[:, None].expand(self.sessions, self.tokens, self.context)
        hidden = ~self.mask.gather(2, wide) | (new >= self.tokens)[:, None]
        hidden &= (new >= 0)[:, None]
        if window is not None:
            positions = self.positions.view(self.sessions, self.tokens)
            at = torch.where(new < 0, index, positions.gather(1, which))
            hidden |= at[:, None] <= positions[:, :, None] - window
        return hidden


class Decoder:
    """The forward pass and its KV cache. Rotations are computed for `positions` positions."""

    def __init__(self, spec: ModelSpec, slots: int, positions: int) -> None:
        weight = spec.head.weight
        self._spec = spec
        self._layers = [_TorchLayer(layer, weight.dtype) for layer in spec.layers]
        self._final = _TorchNorm(spec.final, weight.dtype)
        self._rotations = [_table(rotate, positions, spec.head_dim, weight) for rotate in spec.rotations]
        halves = torch.arange(spec.rotated).roll(spec.rotated // 2)  # each rotated dimension's partner
        self._swap = torch.cat([halves, torch.arange(spec.rotated, spec.head_dim)]).to(weight.device)
        # Zeros: unwritten slots are read with weight 0, and 0 · NaN is NaN.
        self._cache = torch.zeros(
            (len(spec.layers), 2 * spec.kv_heads, slots, spec.head_dim), dtype=weight.dtype, device=weight.device
        )
        # Tokens whose embedding is not finite:
        self._not_finite = torch.zeros(slots, dtype=torch.bool, device=weight.device)
        self._windows = {layer.window for layer in spec.layers}
        self._widest = None if None in self._windows else max(window for window in self._windows if window is not None)

    def copied_bytes(self, tokens: int) -> int:
        """Return the number of bytes that attention copies for this many tokens of context."""
        return 2 * self._spec.kv_heads * self._spec.head_dim * self._cache.element_size() * tokens

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        outputs: torch.Tensor,
        parts: Sequence[SessionGroup],
        layers: Sequence[int] = (),
        num_logits: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states of `outputs`, final and after `layers`, and logits of the first `num_logits`."""
        spec = self._spec
        x = spec.embed(ids, positions)
        finite = torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True) < float("inf")
        x = torch.where(finite, x, 0)
        rotations = [
            (cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None])
            for cos, sin in self._rotations
        ]
        states: list[torch.Tensor] = []
        hidden = {window: [part.hidden(window) for part in parts] for window in self._windows}
        for index, layer in enumerate(self._layers):
            of = layer.spec
            read = layer.attention_in(x)
            inner = self._up(of, layer.mlp_in(x) if of.mlp_in else read) if spec.parallel else None
            qkv = _product(of.qkv, read).view(x.shape[0], -1, spec.head_dim)
            self._rotate(layer, qkv, rotations)
            self._cache[index].index_copy_(1, slots, self._storable(qkv[:, spec.heads :]).transpose(0, 1))
            queries = qkv[:, : spec.heads]
            attended = [
                self._attend(index, of.scale, queries[part.first : part.end], part, mask)
                for part, mask in zip(parts, hidden[of.window], strict=True)
            ]
            _add(x, of.out, attended[0] if len(parts) == 1 else torch.cat(attended), layer.attention_out)
            if inner is None:
                inner = self._up(of, layer.mlp_in(x))
            _add(x, of.down, inner, layer.mlp_out)
            if index + 1 in layers:
                states.append(x.index_select(0, outputs))
        reached = self._not_finite_context(~finite[:, 0], slots, parts, hidden[self._widest])
        final = self._final(x.index_select(0, outputs)).masked_fill_(
            reached.index_select(0, outputs)[:, None], float("nan")
        )
        logits = _product(spec.head, final[:num_logits])
        return _capped(logits, spec.logit_softcap), torch.cat([final, *states], dim=1) if states else final

    def copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Copy keys and values from slots to slots."""
        source, target = to_device(torch.tensor([old, new]), self._cache.device)
        self._cache.index_copy_(2, target, self._cache.index_select(2, source))
        self._not_finite.index_copy_(0, target, self._not_finite.index_select(0, source))

    def _not_finite_context(
        self,
        not_finite: torch.Tensor,
        slots: torch.Tensor,
        parts: Sequence[SessionGroup],
        hidden: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return which tokens attend to one whose embedding is not finite, and record the new ones.  # [tokens]

        Such a token is computed as zeros. A NaN in a block would reach tokens that do not attend to it, and sessions
        that get the block later, because 0 · NaN is NaN.
        """
        self._not_finite.index_copy_(0, slots, not_finite)
        blocks = self._not_finite.view(-1, BLOCK_TOKENS)
        reached = [
            # For booleans, "greater" is "and not", in one kernel.
            (blocks.index_select(0, part.table).view(part.sessions, 1, -1) > masked).any(dim=2).view(-1)
            for part, masked in zip(parts, hidden, strict=True)
        ]
        return reached[0] if len(reached) == 1 else torch.cat(reached)

    def _up(self, layer: Layer, read: torch.Tensor) -> torch.Tensor:
        inner = _product(layer.up, read)
        if not self._spec.gated:
            return _activated(inner, self._spec.activation)
        gate, up = inner.chunk(2, dim=-1)
        return _activated(gate, self._spec.activation).mul_(up)

    def _rotate(self, layer: _TorchLayer, qkv: torch.Tensor, rotations: Sequence[Cosines]) -> None:
        """Apply norms and rotation to queries and keys, in place."""
        heads, keys = self._spec.heads, self._spec.heads + self._spec.kv_heads
        if layer.spec.query is not None:
            qkv[:, :heads] = layer.query(qkv[:, :heads])
        if layer.spec.key is not None:
            qkv[:, heads:keys] = layer.key(qkv[:, heads:keys])
        if layer.spec.rope is not None:
            cos, sin = rotations[layer.spec.rope]
            rotated = qkv[:, :keys]
            swapped = rotated.index_select(2, self._swap)
            rotated.mul_(cos).addcmul_(swapped, sin)

    def _storable(self, new: torch.Tensor) -> torch.Tensor:
        """Return keys and values without NaN: float16 overflows, and a later session reads them with weight 0."""
        return new.nan_to_num() if new.dtype == torch.float16 else new

    def _attend(
        self, index: int, scale: float, queries: torch.Tensor, part: SessionGroup, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Map queries [tokens of the part, heads, dim] to [tokens of the part, heads · dim]."""
        spec = self._spec
        group = spec.heads // spec.kv_heads
        # Query heads that share a key head become extra queries: keys and values are read once, never repeated.
        shape = (spec.kv_heads, part.sessions, group, part.tokens, spec.head_dim)
        grouped = queries.view(part.sessions, part.tokens, spec.kv_heads, group, spec.head_dim).permute(2, 0, 3, 1, 4)
        grouped = grouped.reshape(spec.kv_heads * part.sessions, group * part.tokens, spec.head_dim)
        keys, values = self._cached(index, part)  # [kv heads · sessions, context, dim]
        if part.tokens <= FEW_TOKENS or spec.softcap:
            scores = torch.baddbmm(grouped.new_empty(1, 1, 1), grouped, keys.transpose(1, 2), beta=0, alpha=scale)
            scores = _capped(scores, spec.softcap)
            scores.view(*shape[:-1], -1).masked_fill_(hidden[None, :, None], float("-inf"))
            attended = _weighted(torch.softmax(scores, dim=-1), values)
        else:
            seen = ~hidden.repeat(1, group, 1)[None]
            query, key, value = (
                each.view(spec.kv_heads, part.sessions, *each.shape[1:]) for each in (grouped, keys, values)
            )
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
        return attended.view(shape).permute(1, 3, 0, 2, 4).reshape(queries.shape[0], -1)

    def _cached(self, index: int, part: SessionGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather blocks as int64 words: fewer, wider copies."""
        heads, dim = 2 * self._spec.kv_heads, self._spec.head_dim
        blocks = self._cache[index].view(heads, -1, BLOCK_TOKENS * dim).view(torch.int64)
        copied = blocks.index_select(1, part.table).view(self._cache.dtype)
        keys, values = copied.view(2, -1, part.context, dim)
        return keys, values


class _TorchNorm:
    """A norm with statistics in float32. It runs in the model's format if its weight fits: one kernel, not three."""

    def __init__(self, norm: Norm | None, dtype: torch.dtype) -> None:
        self._norm = norm
        if norm is None:
            return
        parts = [part for part in (norm.weight, norm.bias) if part is not None]
        fits = all(torch.equal(part.to(dtype).float(), part) for part in parts)
        self._dtype = dtype if fits else torch.float32
        self._weight = norm.weight.to(self._dtype)
        self._bias = None if norm.bias is None else norm.bias.to(self._dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = self._norm
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
        self.attention_out = _TorchNorm(layer.attention_out, dtype) if layer.attention_out else None
        self.mlp_out = _TorchNorm(layer.mlp_out, dtype) if layer.mlp_out else None
        self.query = _TorchNorm(layer.query, dtype)
        self.key = _TorchNorm(layer.key, dtype)


def _product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _add(x: torch.Tensor, linear: Linear, read: torch.Tensor, norm: _TorchNorm | None) -> None:
    """Add a product to x, after the output norm if there is one."""
    if norm is not None:
        x.add_(norm(_product(linear, read)))
    elif linear.bias is not None:
        x.add_(_product(linear, read))
    else:
        x.addmm_(read, linear.weight.T)


def _activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return x.div_(cap).tanh_().mul_(cap) if cap else x


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiply weights [batch, tokens, context] by values [batch, context, dim], with a long context in splits.

    The library assigns each small result to one processor, which would read a whole context while the others are idle.
    """
    batch, tokens, context = weights.shape
    splits = min(context // _SPLIT_TOKENS, _SPLITS // batch)
    splits = 1 << (splits.bit_length() - 1) if splits > 1 and context & (context - 1) == 0 else 1
    if splits == 1:
        return torch.bmm(weights, values)
    split = weights.view(batch, tokens, splits, -1).transpose(1, 2).reshape(batch * splits, tokens, -1)
    parts = torch.bmm(split, values.view(batch * splits, -1, values.shape[2]))
    return parts.view(batch, splits, tokens, -1).sum(dim=1)


def _table(rotate: Callable[[torch.Tensor], Cosines], positions: int, dim: int, like: torch.Tensor) -> Cosines:
    """Return cosines and signed sines by position; 1 and 0 where a head is not rotated.  # [positions, dim] each"""
    cos, sin = rotate(torch.arange(positions, device=like.device))
    rotated = cos.shape[1]
    whole_cos, whole_sin = cos.new_ones(positions, dim), sin.new_zeros(positions, dim)
    whole_cos[:, :rotated] = cos
    whole_sin[:, :rotated] = sin
    whole_sin[:, : rotated // 2].neg_()
    return whole_cos.to(like.dtype), whole_sin.to(like.dtype)
