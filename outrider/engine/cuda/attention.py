"""Attention on a CUDA device: how its kernels are launched. Import this module only where Triton is installed."""

from __future__ import annotations

import functools

import torch
import triton

from outrider.engine.cuda import triton_attention
from outrider.engine.cuda.step_inputs import StepInputs

# Tuned on an H200 with the shapes of an 8B model, 1 to 128 sessions after 1,000 to 16,000 tokens:
_TILE_BYTES = 32_768  # of the keys that are read at once, at most
_SHARED_MEMORY = 160 << 10  # bytes; a device with less reads half as much
_PROGRAMS = 4224  # at most: 32 for each processor of a large GPU
_HEADS = 4  # that a program rotates
_CHUNK = 16  # parts of a sum read at once


def place(
    qkv: torch.Tensor,
    queries: torch.Tensor,
    cache: torch.Tensor,
    inputs: StepInputs,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    rotated: int,
) -> None:
    """Write rotated queries, and rotated keys and values into a layer's cache.  # qkv, queries: [tokens, heads, dim]"""
    (tokens, heads, dim), kv_heads = queries.shape, len(cache) // 2
    cosines, sines = rotation or (qkv, qkv)
    triton_attention.place[(tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        qkv, queries, cache, inputs.slots, inputs.positions, cosines, sines, qkv.stride(0), cache.stride(0),
        heads=heads, kv_heads=kv_heads, dim=dim, rotated=rotated if rotation else 0,
        finite=cache.dtype == torch.float16, some=_HEADS, width=triton.next_power_of_2(dim),
    )  # fmt: skip


def attend(
    queries: torch.Tensor,
    cache: torch.Tensor,
    inputs: StepInputs,
    out: torch.Tensor,
    scale: float,
    cap: float,
    window: int | None,
    flags: torch.Tensor | None,
    reached: torch.Tensor,
) -> None:
    """Attend to a layer's cache. With `flags` of slots, write which tokens `reached` one that is set.  # [tokens]"""
    (tokens, heads, dim), kv_heads = queries.shape, len(cache) // 2
    width = max(16, triton.next_power_of_2(dim))
    keys = _tile_bytes(cache.device) // (width * cache.element_size())
    for whole, items in ((False, inputs.items), (True, inputs.whole_items)):
        if len(items):
            shape = inputs.blocks[whole]
            triton_attention.attend[(min(len(items), max(1, _PROGRAMS // kv_heads)), kv_heads)](
                queries, cache, cache if flags is None else flags, items, inputs.num_items[whole:], inputs.lanes,
                inputs.pages, inputs.links, inputs.positions, inputs.parts, inputs.stats, out, reached,
                cache.stride(0), scale, cap, window or 0,
                kv_heads=kv_heads, group=heads // kv_heads, dim=dim, rows=shape.rows, width=width, block=shape.lanes,
                tile=min(128, keys), capped=cap > 0,
                windowed=window is not None, flagged=flags is not None, whole=whole, num_warps=4, num_stages=2,
            )  # fmt: skip
    if len(inputs.items):
        triton_attention.combine[(tokens, heads)](
            inputs.parts, inputs.stats, inputs.joins, out, reached,
            heads=heads, dim=dim, width=width, chunk=_CHUNK, flagged=flags is not None, num_warps=2,
        )  # fmt: skip


@functools.cache
def _tile_bytes(device: torch.device) -> int:
    """Return the bytes of the keys that a program reads at once."""
    if device.type != "cuda":  # in Triton's interpreter
        return _TILE_BYTES
    memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return _TILE_BYTES if memory >= _SHARED_MEMORY else _TILE_BYTES // 2
