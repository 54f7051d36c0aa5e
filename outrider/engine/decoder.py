"""The arithmetic of a plan in torch, over keys and values in pages; `cuda_graphs` decides in which shapes it runs.

All of a step's sessions share the products with the weights. Attention sees
them in parts: sessions of one padded shape, each with its own page table.
Nothing in here waits for the device or asks it for a number, so that a CUDA
graph may hold all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.engine.block_manager import BLOCK_TOKENS
from outrider.engine.model_spec import Cosines, Layer, Linear, ModelSpec, Norm

FEW_ROWS = 64  # up to here a session's scores are written out; above, they would not fit
_SPLIT_TOKENS = 512  # of a context: the least that is worth a share of the device of its own
_SPLITS = 128  # about as many shares as a large device has processors


@dataclass(frozen=True, slots=True)
class SessionGroup:
    """Sessions of a step that attend together, padded to one shape.

    The step's rows from `first` on are theirs, `rows` to each. A row of
    padding sees itself, so that nothing is ever divided by zero.
    """

    first: int
    sessions: int
    rows: int
    table: torch.Tensor  # pages one after the other  # [sessions · pages]
    base: torch.Tensor  # tokens cached before  # [sessions]
    positions: torch.Tensor  # [sessions · rows]
    sees: torch.Tensor  # which new rows each new row sees  # [sessions, rows, rows]

    @property
    def context(self) -> int:
        return self.table.shape[0] // self.sessions * BLOCK_TOKENS

    @property
    def end(self) -> int:
        return self.first + self.sessions * self.rows

    def hidden(self, window: int | None) -> torch.Tensor:
        """What each row does not see of its session's pages.  # [sessions, rows, context]"""
        index = torch.arange(self.context, device=self.table.device)
        new = index - self.base[:, None]  # [sessions, context]
        which = new.clamp(0, self.rows - 1)
        wide = which[:, None].expand(self.sessions, self.rows, self.context)
        hidden = ~self.sees.gather(2, wide) | (new >= self.rows)[:, None]
        hidden &= (new >= 0)[:, None]
        if window is not None:
            positions = self.positions.view(self.sessions, self.rows)
            at = torch.where(new < 0, index, positions.gather(1, which))
            hidden |= at[:, None] <= positions[:, :, None] - window
        return hidden


class Decoder:
    """`positions` is how many the rotations are made for."""

    def __init__(self, plan: ModelSpec, slots: int, positions: int) -> None:
        weight = plan.head.weight
        self._plan = plan
        self._layers = [_TorchLayer(layer, weight.dtype) for layer in plan.layers]
        self._final = _TorchNorm(plan.final, weight.dtype)
        self._turns = [_table(turn, positions, plan.head_dim, weight) for turn in plan.rotations]
        self._swap = _swapped(plan.rotated, plan.head_dim).to(weight.device)
        # Zeros: what was never written is read, and weighs nothing only if it is a number.
        self._pool = torch.zeros(
            (len(plan.layers), 2 * plan.kv_heads, slots, plan.head_dim), dtype=weight.dtype, device=weight.device
        )
        self._bad = torch.zeros(slots, dtype=torch.bool, device=weight.device)  # tokens whose embedding is not finite
        self._windows = {layer.window for layer in plan.layers}
        self._widest = None if None in self._windows else max(window for window in self._windows if window is not None)

    def copied_bytes(self, tokens: int) -> int:
        """Bytes that attention copies for this many tokens of context."""
        return 2 * self._plan.kv_heads * self._plan.head_dim * self._pool.element_size() * tokens

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        wanted: torch.Tensor,
        parts: Sequence[SessionGroup],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and final hidden states of the wanted rows."""
        plan = self._plan
        x = plan.embed(ids, positions)
        good = torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True) < float("inf")
        x = torch.where(good, x, 0)
        turns = [
            (cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None])
            for cos, sin in self._turns
        ]
        hidden = {window: [part.hidden(window) for part in parts] for window in self._windows}
        for index, layer in enumerate(self._layers):
            of = layer.of
            read = layer.attention_in(x)
            inner = self._up(of, layer.mlp_in(x) if of.mlp_in else read) if plan.parallel else None
            qkv = _product(of.qkv, read).view(x.shape[0], -1, plan.head_dim)
            self._turn(layer, qkv, turns)
            self._pool[index].index_copy_(1, slots, self._storable(qkv[:, plan.heads :]).transpose(0, 1))
            queries = qkv[:, : plan.heads]
            attended = [
                self._attend(index, of.scale, queries[part.first : part.end], part, mask)
                for part, mask in zip(parts, hidden[of.window], strict=True)
            ]
            _add(x, of.out, attended[0] if len(parts) == 1 else torch.cat(attended), layer.attention_out)
            if inner is None:
                inner = self._up(of, layer.mlp_in(x))
            _add(x, of.down, inner, layer.mlp_out)
        spoilt = self._spoilt(~good[:, 0], slots, parts, hidden[self._widest])
        final = self._final(x.index_select(0, wanted)).masked_fill_(
            spoilt.index_select(0, wanted)[:, None], float("nan")
        )
        logits = _product(plan.head, final)
        return _capped(logits, plan.logit_softcap), final

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        pages = self._pool.view(*self._pool.shape[:2], -1, BLOCK_TOKENS, self._pool.shape[3])
        for source, target in copies:
            pages[:, :, target] = pages[:, :, source]
            bad = self._bad.view(-1, BLOCK_TOKENS)
            bad[target] = bad[source]

    def move(self, old: Sequence[int], new: Sequence[int]) -> None:
        source, target = torch.tensor([old, new], device=self._pool.device)
        self._pool.index_copy_(2, target, self._pool.index_select(2, source))
        self._bad.index_copy_(0, target, self._bad.index_select(0, source))

    def _spoilt(
        self, bad: torch.Tensor, slots: torch.Tensor, parts: Sequence[SessionGroup], hidden: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return which rows see a token whose embedding is not finite, and remember the new ones.  # [rows]

        Such a token is computed as zeros: a NaN in a page would reach rows that do not see it, and sessions that get
        the page later, since a weight of 0 does not stop it.
        """
        self._bad.index_copy_(0, slots, bad)
        pages = self._bad.view(-1, BLOCK_TOKENS)
        found = [
            # "Greater" is "and not": one kernel.
            (pages.index_select(0, part.table).view(part.sessions, 1, -1) > unseen).any(dim=2).view(-1)
            for part, unseen in zip(parts, hidden, strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _up(self, layer: Layer, read: torch.Tensor) -> torch.Tensor:
        inner = _product(layer.up, read)
        if not self._plan.gated:
            return _activated(inner, self._plan.activation)
        gate, up = inner.chunk(2, dim=-1)
        return _activated(gate, self._plan.activation).mul_(up)

    def _turn(self, layer: _TorchLayer, qkv: torch.Tensor, turns: Sequence[Cosines]) -> None:
        """Norms and rotation of queries and keys, in place."""
        heads, keys = self._plan.heads, self._plan.heads + self._plan.kv_heads
        if layer.of.query is not None:
            qkv[:, :heads] = layer.query(qkv[:, :heads])
        if layer.of.key is not None:
            qkv[:, heads:keys] = layer.key(qkv[:, heads:keys])
        if layer.of.rope is not None:
            cos, sin = turns[layer.of.rope]
            turned = qkv[:, :keys]
            swapped = turned.index_select(2, self._swap)
            turned.mul_(cos).addcmul_(swapped, sin)

    def _storable(self, new: torch.Tensor) -> torch.Tensor:
        """float16 overflows; what one session leaves in a page must weigh nothing for the next, and NaN · 0 is NaN."""
        return new.nan_to_num() if new.dtype == torch.float16 else new

    def _attend(
        self, index: int, scale: float, queries: torch.Tensor, part: SessionGroup, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Queries [rows of the part, heads, dim] → [rows of the part, heads · dim]."""
        plan = self._plan
        group = plan.heads // plan.kv_heads
        # Query heads that share a key head become extra rows: keys and values are read once, never repeated.
        shape = (plan.kv_heads, part.sessions, group, part.rows, plan.head_dim)
        grouped = queries.view(part.sessions, part.rows, plan.kv_heads, group, plan.head_dim).permute(2, 0, 3, 1, 4)
        grouped = grouped.reshape(plan.kv_heads * part.sessions, group * part.rows, plan.head_dim)
        keys, values = self._cached(index, part)  # [kv heads · sessions, context, dim]
        if part.rows <= FEW_ROWS or plan.softcap:
            scores = torch.baddbmm(grouped.new_empty(1, 1, 1), grouped, keys.transpose(1, 2), beta=0, alpha=scale)
            scores = _capped(scores, plan.softcap)
            scores.view(*shape[:-1], -1).masked_fill_(hidden[None, :, None], float("-inf"))
            attended = _weighted(torch.softmax(scores, dim=-1), values)
        else:
            seen = ~hidden.repeat(1, group, 1)[None]
            query, key, value = (
                each.view(plan.kv_heads, part.sessions, *each.shape[1:]) for each in (grouped, keys, values)
            )
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
        return attended.view(shape).permute(1, 3, 0, 2, 4).reshape(queries.shape[0], -1)

    def _cached(self, index: int, part: SessionGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Copied page by page, in the widest numbers there are: what they mean is no matter here."""
        heads, dim = 2 * self._plan.kv_heads, self._plan.head_dim
        pages = self._pool[index].view(heads, -1, BLOCK_TOKENS * dim).view(torch.int64)
        copied = pages.index_select(1, part.table).view(self._pool.dtype)
        keys, values = copied.view(2, -1, part.context, dim)
        return keys, values


class _TorchNorm:
    """Statistics in float32. In the weights' own format where its weight fits in it: that is one kernel, not three."""

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
    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        self.of = layer
        self.attention_in = _TorchNorm(layer.attention_in, dtype)
        self.mlp_in = _TorchNorm(layer.mlp_in, dtype)
        self.attention_out = _TorchNorm(layer.attention_out, dtype) if layer.attention_out else None
        self.mlp_out = _TorchNorm(layer.mlp_out, dtype) if layer.mlp_out else None
        self.query = _TorchNorm(layer.query, dtype)
        self.key = _TorchNorm(layer.key, dtype)


def _product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _add(x: torch.Tensor, linear: Linear, read: torch.Tensor, norm: _TorchNorm | None) -> None:
    """x += product, normalised first where the model says so."""
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
    """Weights [batch, rows, context] · values [batch, context, dim], a long context in shares.

    A library gives each small result to one processor, which then reads all
    of a context alone while the others wait.
    """
    batch, rows, context = weights.shape
    shares = min(context // _SPLIT_TOKENS, _SPLITS // batch)
    shares = 1 << (shares.bit_length() - 1) if shares > 1 and context & (context - 1) == 0 else 1
    if shares == 1:
        return torch.bmm(weights, values)
    split = weights.view(batch, rows, shares, -1).transpose(1, 2).reshape(batch * shares, rows, -1)
    parts = torch.bmm(split, values.view(batch * shares, -1, values.shape[2]))
    return parts.view(batch, shares, rows, -1).sum(dim=1)


def _table(turn: Callable[[torch.Tensor], Cosines], positions: int, dim: int, like: torch.Tensor) -> Cosines:
    """Cosines and signed sines of all positions, 1 and 0 where a head is not rotated.  # [positions, dim] each"""
    cos, sin = turn(torch.arange(positions, device=like.device))
    rotated = cos.shape[1]
    whole_cos, whole_sin = cos.new_ones(positions, dim), sin.new_zeros(positions, dim)
    whole_cos[:, :rotated] = cos
    whole_sin[:, :rotated] = sin
    whole_sin[:, : rotated // 2].neg_()
    return whole_cos.to(like.dtype), whole_sin.to(like.dtype)


def _swapped(rotated: int, dim: int) -> torch.Tensor:
    """Where a head's dimension finds its partner: the other half of what is rotated."""
    return torch.cat([torch.arange(rotated).roll(rotated // 2), torch.arange(rotated, dim)])
