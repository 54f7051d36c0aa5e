"""The attention kernels compute what torch computes, in Triton's interpreter."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from outrider.engine.cuda.step_inputs import InputSizes, QueryBlock, StepInputs, StepLayout
from outrider.engine.interface import SessionTokens
from outrider.engine.paged.block_manager import BLOCK_TOKENS, blocks_for
from outrider.engine.paged.step import ForwardStep, Segment
from tests.emulated_cuda import KernelsInTorch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton, and TRITON_INTERPRET=1 before its import (make vllm)",
)
BLOCKS = 200
# Cached tokens, and parents of new ones or their number: across ranges and tiles, trees, and a prompt.
SESSIONS: list[tuple[int, int | tuple[int, ...]]] = [
    (0, 1),
    (130, 9),
    (300, (-1, 0, 0, 2, -1)),
    (110, tuple(max(-1, i - 1 - i % 3) for i in range(40))),  # from one tile to the next
    (2100, 3),
    (70, 70),
]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return import_module("outrider.engine.cuda.attention")


def _step(sessions: list[tuple[int, int | tuple[int, ...]]]) -> ForwardStep:
    """Return a step whose sessions have scattered blocks."""
    free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    segments, start = [], 0
    for base, new in sessions:
        count, parents = (new, ()) if isinstance(new, int) else (len(new), new)
        blocks = [free.pop() for _ in range(blocks_for(base + count))]
        segments.append(Segment.of(start, SessionTokens("s", [3] * count, parents), base, blocks))
        start += count
    return ForwardStep.of(segments, [], [])


def _inputs(
    step: ForwardStep, heads: int, kv_heads: int, dim: int, spare: int = 0
) -> tuple[StepInputs, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a step's inputs with room for more, and random products, queries and cache."""
    blocks = [QueryBlock.of(heads // kv_heads, lanes) for lanes in (16, 128)]
    layout = StepLayout(step, blocks)
    sizes = InputSizes(*(getattr(layout.sizes, name) + spare for name in InputSizes.__slots__))
    inputs = StepInputs(sizes, blocks, heads, dim, BLOCKS, torch.device("cpu"))
    inputs.send(layout)
    generator = torch.Generator().manual_seed(2)
    tokens = layout.sizes.tokens
    qkv = torch.randn((tokens, heads + 2 * kv_heads, dim), generator=generator)
    cache = torch.randn((2 * kv_heads, (BLOCKS + 1) * BLOCK_TOKENS, dim), generator=generator)
    return inputs, qkv, torch.full((tokens, heads, dim), float("nan")), cache


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), [(4, 2, 16, 16), (7, 1, 24, 8), (3, 3, 8, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_and_values_are_placed(
    kernels: ModuleType, heads: int, kv_heads: int, dim: int, rotated: int, dtype: torch.dtype
) -> None:
    inputs, qkv, queries, cache = _inputs(_step(SESSIONS), heads, kv_heads, dim)
    qkv[0, 0, 0], qkv[1, -1, 0], qkv[2, -1, 1] = float("nan"), float("inf"), float("nan")
    angles = torch.randn((4096, dim), generator=torch.Generator().manual_seed(4))
    rotation = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotated else None
    found, wanted = ([each.to(dtype) for each in (qkv, queries, cache)] for _ in range(2))
    kernels.place(found[0].clone(), found[1], found[2], inputs, rotation, rotated)
    KernelsInTorch.place(wanted[0].clone(), wanted[1], wanted[2], inputs, rotation, rotated)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert found[2].isfinite().all() or dtype == torch.float32


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "cap", "window", "spare"),
    [
        (4, 2, 16, 0.0, None, 0),
        (4, 2, 16, 5.0, None, 40),
        (4, 2, 16, 0.0, 100, 40),
        (7, 1, 24, 5.0, 7, 0),
        (20, 1, 8, 0.0, None, 40),
    ],
)
def test_attention_is_torchs(
    kernels: ModuleType, heads: int, kv_heads: int, dim: int, cap: float, window: int | None, spare: int
) -> None:
    inputs, qkv, _, cache = _inputs(_step(SESSIONS), heads, kv_heads, dim, spare)
    queries = qkv[:, :heads].contiguous()
    flags = torch.zeros(len(cache[0]), dtype=torch.uint8)
    flags[inputs.slots[[1, 2, 12]]] = 1
    given = flags if spare else None  # without, tiles that all tokens see are not masked
    outs = [torch.full_like(queries, float("nan")) for _ in range(2)]
    reached = [torch.full((len(queries),), -1, dtype=torch.int32) for _ in range(2)]
    for module, out, reach in zip((kernels, KernelsInTorch), outs, reached, strict=True):
        module.attend(queries, cache, inputs, out, dim**-0.5, cap, window, given, reach)
    assert torch.allclose(*outs, rtol=1e-4, atol=1e-5)
    assert reached[0].tolist() == reached[1].tolist()
    assert not spare or 0 < sum(reached[0].tolist()) < len(queries)


def test_a_tokens_sum_depends_on_its_own_context_alone(kernels: ModuleType) -> None:
    """The same bits alone, in a block of guesses, and beside other sessions."""

    def attended(sessions: list[tuple[int, int | tuple[int, ...]]], token: int) -> torch.Tensor:
        inputs, _, _, cache = _inputs(_step(sessions), 4, 2, 16)
        generator = torch.Generator().manual_seed(8)
        whole = torch.randn((2400, 4, 16), generator=generator)
        stored = torch.randn((4, 2400, 16), generator=generator)
        for segment in _step(sessions).segments[:1]:
            index = torch.arange(segment.base + segment.count)
            cache[:, torch.tensor(segment.blocks)[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS] = (
                stored[:, index]
            )
        queries = torch.zeros((inputs.sizes.tokens, 4, 16))
        queries[: segment.count] = whole[segment.base : segment.base + segment.count]
        out, reached = torch.empty_like(queries), torch.zeros(len(queries), dtype=torch.int32)
        kernels.attend(queries, cache, inputs, out, 0.25, 0.0, None, None, reached)
        return out[token]

    alone = attended([(2100, 1)], 0)
    for sessions, token in (([(2098, 9)], 2), ([(2100, 1), (40, 1), (900, 5)], 0), ([(2060, 60)], 40)):
        assert torch.equal(attended(sessions, token), alone)
