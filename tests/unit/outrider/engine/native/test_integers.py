"""Products in integers: the documented sums, with the same bits for every instruction set and number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch

from outrider.base.config import home
from outrider.engine import SessionTokens
from outrider.engine.model_spec import Linear
from outrider.engine.native import NativeEngine, build
from outrider.engine.native import engine as native_engine
from outrider.models.in_place import QuantizedRows
from tests.unit.outrider.engine.native.test_quantized_rows import (
    KINDS,
    TOKENS,
    engine,
    float32,
    logits,
    model,
    random_rows,
)
from tests.unit.outrider.engine.native.tiles import tiles

LEVELS = ["native"] + [level for level, needed in build.levels().items() if torch.cpu.get_capabilities().get(needed)]
OUTPUTS, INPUTS = 40, 512  # outputs: no multiple of what is computed together


@contextmanager
def integers(level: str = "native") -> Iterator[None]:
    """Let engines that are made meanwhile have the kernels of a level, without attention in tiles."""
    built = build.load(build.compile_for(level, home() / "kernels"))
    with patch.object(built, "outrider_tiles", lambda: 0), patch.object(native_engine, "library", lambda: built):
        yield


def product(
    runs: NativeEngine, rows: QuantizedRows, x: torch.Tensor, function: str = "product_integers"
) -> torch.Tensor:
    """`product_integers` uses the instructions of its level, `product` those of the processor."""
    linear = runs._linear(Linear(torch.empty(OUTPUTS, rows.inputs, device="meta"), None, (rows,)), "float32")
    assert linear.arithmetic == 2
    scratch, found = torch.zeros(1 << 20), torch.zeros(len(x), OUTPUTS)
    step = build.structures().Step(threads=1, tiles=scratch.data_ptr(), exact=function == "exact")
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, found)]
    run = runs._library["product" if function == "exact" else function]
    run(ctypes.byref(linear), addresses[0], len(x), addresses[1], OUTPUTS, 0, ctypes.byref(step))
    return found


def numbers_of(kind: str, rows: QuantizedRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the quants [outputs, inputs] of a file's blocks, and their scales and minima by input."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    blocks = rows.stored.numpy().reshape(OUTPUTS, -1, size)
    scale = blocks[:, :, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        quants, minimum = blocks[:, :, 2:].copy().view(np.int8), np.zeros_like(scale)
    else:
        packed = blocks[:, :, size - 16 :]
        quants = np.concatenate([packed & 15, packed >> 4], axis=2)
        minimum = -8 * scale if kind == "Q4_0" else blocks[:, :, 2:4].copy().view(np.float16).astype(np.float32)
    by_input = [np.repeat(each, 32, axis=2).reshape(OUTPUTS, -1) for each in (scale, minimum)]
    return quants.reshape(OUTPUTS, -1).astype(np.int64), by_input[0], by_input[1]


def by_hand(kind: str, rows: QuantizedRows, x: torch.Tensor) -> torch.Tensor:
    """The sums that integers.h documents. In extended precision a fused operation is exact before its rounding."""
    quants, scales, minima = numbers_of(kind, rows)
    sums = np.zeros((len(x), OUTPUTS), np.float32)
    for start in range(0, INPUTS, 32):
        block = x[:, start : start + 32].numpy()
        peak = np.abs(block).max(axis=1, keepdims=True)
        factor = (np.float32(32767) / peak).astype(np.float32)
        rounded = np.rint((block * factor).astype(np.float32)).astype(np.int64)
        scale = (peak / np.float32(32767)).astype(np.float32)
        exact = (rounded @ quants[:, start : start + 32].T).astype(np.float32)
        wide = np.longdouble
        both = (scale * scales[None, :, start]).astype(np.float32)
        sums = (exact.astype(wide) * both.astype(wide) + sums.astype(wide)).astype(np.float32)
        if kind != "Q8_0":
            total = (scale * rounded.sum(axis=1, keepdims=True).astype(np.float32)).astype(np.float32)
            sums = (minima[None, :, start].astype(wide) * total.astype(wide) + sums.astype(wide)).astype(np.float32)
    return torch.from_numpy(sums)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_products_are_the_documented_sums(kind: str, level: str) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, x = random_rows(kind, OUTPUTS, INPUTS, generator), torch.randn(13, INPUTS, generator=generator)
    with integers(level):
        found = product(engine(model("Q4_1"), exact=False), rows, x)
    assert torch.equal(found, by_hand(kind, rows, x))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_near_the_exact_ones_and_have_the_same_bits_at_every_level(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, x = random_rows(kind, OUTPUTS, INPUTS, generator), torch.randn(25, INPUTS, generator=generator)
    x[3] *= 1e-35  # too small for a scale: counts as zero
    x[4, :32] *= 1e6  # the rest of this row has blocks with other scales
    found = []
    for level in LEVELS:
        with integers(level):
            runs = engine(model("Q4_1"), exact=False)
            found += [product(runs, rows, x), product(runs, rows, x, "product")]
            exact = product(runs, rows, x, "exact")
    weight = rows.dequantize()
    assert torch.allclose(exact, x @ weight.T, rtol=1e-3, atol=1e-3)
    for each in found:
        assert torch.equal(each, found[0])
        assert not each[3].any()
    for row, (near, true) in enumerate(zip(found[0], exact, strict=True)):
        bound = 1e-5 * float(x[row].norm() * weight.norm(dim=1).max())
        assert row == 3 or 0 < (near - true).abs().max() < max(bound, 1e-5 * float(true.abs().max()))


@pytest.mark.parametrize(("kind", "inputs"), [*((kind, INPUTS) for kind in KINDS), ("Q4_1", 288), ("Q8_0", 288)])
@pytest.mark.parametrize("rows", [10, 16, 17, 33, 65, 130])
def test_tiles_give_many_rows_the_same_bits(kind: str, inputs: int, rows: int) -> None:
    """Rows in one group, in unequal groups and in several slices; blocks in turns that are not full."""
    generator = torch.Generator().manual_seed(rows)
    weights, x = random_rows(kind, OUTPUTS, inputs, generator), torch.randn(rows, inputs, generator=generator)
    x[1, ::2] = 1  # the largest numbers of their blocks: rounded to 32767
    x[2, ::2] = -1
    x[3, 70] = torch.nan
    x[4] = 0
    with integers():
        expected = product(engine(model("Q4_1"), exact=False), weights, x)
    with tiles():
        found = product(engine(model("Q4_1"), exact=False), weights, x, "product_integers_tiles")
        chosen = product(engine(model("Q4_1"), exact=False), weights, x, "product")
    assert found[3].isnan().all()
    for each in (found, chosen):
        assert torch.equal(each.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_stays_in_its_row(wrong: float) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, x = random_rows("Q4_1", OUTPUTS, INPUTS, generator), torch.randn(6, INPUTS, generator=generator)
    with integers():
        runs = engine(model("Q4_1"), exact=False)
        before = product(runs, rows, x)
        x[2, 77] = wrong
        after = product(runs, rows, x)
    assert after[2].isnan().all()
    assert torch.equal(after[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("kind", [*KINDS, "mixed", "int8"])
def test_a_sessions_bits_do_not_depend_on_the_number_of_rows(kind: str) -> None:
    made = model("Q4_K", "Q6_K") if kind == "mixed" else float32(model("Q4_1")) if kind == "int8" else model(kind)
    weights = "int8" if kind == "int8" else "float32"
    with integers():
        runs = engine(made, threads=2 if kind == "Q8_0" else 1, weights=weights, exact=False)
    assert runs.in_integers
    assert ", integers 1, " in runs.arithmetic
    found = logits(runs).clone()
    with integers():
        exact = logits(engine(made, weights=weights)).clone()
    assert 0 < (found - exact).norm() < 1e-3 * exact.norm()
    for size in (1, 2, 4, 5, 12, 13, 17, 40):
        runs.free("s")
        runs.blocks.pool.evict_all()
        for at in range(0, 80, size):
            neighbours = [SessionTokens(f"n{i}", TOKENS[i : i + 5 * i + 1]) for i in range(size % 3)]
            rows = runs.extend([*neighbours, SessionTokens("s", TOKENS[at : at + size])]).logits[-1]
            assert torch.equal(rows[: 80 - at], found[at : min(80, at + size)])
            for each in neighbours:
                runs.free(each.session)
    runs.free("s")
    runs.blocks.pool.evict_all()
    runs.exact = True
    assert torch.equal(logits(runs), exact)
