"""Weights in the blocks of a GGUF file give the bits of the same weights in float32."""

from __future__ import annotations

import ctypes
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.base.config import home
from outrider.engine import SessionTokens
from outrider.engine.model_spec import Linear, build_spec
from outrider.engine.native import NativeEngine, build, dequantize
from outrider.engine.native import engine as native_engine
from outrider.models.in_place import QuantizedRows, detach_rows
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from tests.unit.outrider.engine.native.tiles import tiles

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
LEVELS = [level for level, needed in build.levels().items() if torch.cpu.get_capabilities().get(needed)]
VOCAB = 208  # a multiple of 16 and of no panel
TOKENS = torch.randint(VOCAB, (120,), generator=torch.Generator().manual_seed(3)).tolist()


def random_rows(kind: str, outputs: int, inputs: int, generator: torch.Generator) -> QuantizedRows:
    """Random blocks, with scales that are small numbers."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    rows = torch.randint(256, (outputs, inputs // block, size), dtype=torch.uint8, generator=generator)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}[kind]
    least = {"Q4_0": 24, "Q4_1": 24, "Q6_K": 1}.get(kind, 8)
    for at in halves:
        rows[:, :, at + 1] = rows[:, :, at + 1] % (2 if least == 1 else 8) + least + 128 * (at == 2)
    return QuantizedRows(int(number), rows.view(outputs, -1), inputs)


def model(kind: str, mixed: str | None = None) -> Any:
    """A Llama whose weights are dequantised blocks, and carry them; with `mixed`, values have blocks of that kind."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
    )
    made, generator = LlamaForCausalLM(config).eval(), torch.Generator().manual_seed(1)
    for name, module in made.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            outputs, inputs = module.weight.shape
            rows = random_rows(mixed if mixed and "v_proj" in name else kind, outputs, inputs, generator)
            module.weight.data = rows.dequantize()
            module.weight.quantized = rows  # type: ignore[assignment]
    return made


def engine(made: Any, threads: int = 1, **options: Any) -> NativeEngine:
    return NativeEngine(
        build_spec(made), ModelInfo("m", "f", vocab_size=VOCAB), kv_tokens=1024, threads=threads, **options
    )


def logits(runs: NativeEngine) -> torch.Tensor:
    whole = runs.extend([SessionTokens("s", TOKENS)]).logits[0].clone()
    tree = runs.extend([SessionTokens("s", [1, 2, 3, 4, 5], (-1, -1, 0, 1, 1))]).logits[0]
    return torch.cat([whole, tree])


def float32(made: Any) -> Any:
    for module in made.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.__dict__.pop("quantized", None)
    return made


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_blocks_give_the_bits_of_float32(kind: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build.load(build.compile_for(level, home() / "kernels"))
    monkeypatch.setattr("outrider.engine.native.engine.library", lambda: built)
    made = model("Q4_K", "Q6_K") if kind == "mixed" else model(kind)
    blocks = engine(made, threads=2 if kind == "Q8_0" else 1)
    assert blocks._layers[0].down[0].kind > 1
    assert [part.outputs for part in blocks._layers[0].qkv] == ([320, 64, 0] if kind == "mixed" else [384, 0, 0])
    found = logits(blocks).clone()
    for size in (1, 2, 13, 40):
        blocks.free("s")
        blocks.blocks.pool.evict_all()
        parts = [SessionTokens("s", TOKENS[at : at + size]) for at in range(0, 80, size)]
        pieces = [blocks.extend([part]).logits[0].clone() for part in parts]
        assert torch.equal(torch.cat(pieces)[:80], found[:80])
    assert torch.equal(found, logits(engine(float32(made))))


@pytest.mark.parametrize(
    ("kind", "most"), [("Q4_0", 1.12), ("Q4_1", 1.0), ("Q8_0", 1.0), ("Q4_K", 1.03), ("Q5_K", 1.03), ("Q6_K", 1.0)]
)
def test_packed_blocks_are_hardly_larger_than_those_of_the_file(kind: str, most: float) -> None:
    rows, runs = random_rows(kind, 64, 512, torch.Generator().manual_seed(1)), engine(model("Q4_1"))
    before = runs._memory.taken
    runs._linear(Linear(torch.empty(64, 512, device="meta"), None, (rows,)), "float32")
    assert runs._memory.taken - before <= most * rows.stored.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_dequantises_the_rows_that_it_is_asked_for(kind: str) -> None:
    made = model(kind)
    embeddings = made.get_input_embeddings()
    ids = torch.tensor([[3, 1], [3, 207]])
    before = embeddings(ids)
    embeddings.weight.data = torch.full((1,), torch.nan).expand(VOCAB, 256)  # as where the file has the weight
    detach_rows(made, dequantize)
    assert not any(hasattr(weight, "quantized") for weight in made.parameters())
    assert torch.equal(embeddings(ids), before)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_without_a_row_is_refused(token: int) -> None:
    """The table ends there: nothing is read beside it."""
    made = model("Q4_0")
    rows = made.get_input_embeddings().weight.quantized
    with pytest.raises(IndexError):
        dequantize(rows, torch.tensor([3, token]))
    with torch.inference_mode():
        runs = engine(made)
        detach_rows(made, dequantize)
        with pytest.raises(IndexError):
            runs.extend([SessionTokens("s", [3, token])])


def added(sums: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a tile adds: [rows, outputs] + [rows, 32] · [outputs, 32], by hand. Doubles hold products of bfloat16."""
    chains = torch.zeros(2, *sums.shape)
    for k in range(32):
        chains[k % 2] = (chains[k % 2].double() + x[:, None, k].double() * weights[None, :, k].double()).float()
    return sums + (chains[0] + chains[1])


@pytest.mark.parametrize("rows", [9, 19, 70])
def test_products_in_tiles_are_the_documented_sums(rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 256, generator=generator)
    weight = torch.randn(40, 256, generator=generator).bfloat16().float()
    with tiles():
        runs = engine(model("Q4_1"), exact=False)
    linear = runs._linear(Linear(weight), "float32")
    assert linear.arithmetic == 1
    scratch, found = torch.zeros(1 << 20), torch.zeros(rows, 40)
    step = build.structures().Step(threads=1, tiles=scratch.data_ptr())
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, found)]
    runs._library.product_tiles(ctypes.byref(linear), addresses[0], rows, addresses[1], 40, 0, ctypes.byref(step))
    x1 = x.bfloat16().float()
    x2 = (x - x1).bfloat16().float()
    sums = torch.zeros(rows, 40)
    for k in range(0, 256, 32):
        block = slice(k, k + 32)
        sums = added(sums, weight[:, block], x1[:, block])
        sums = added(sums, weight[:, block], x2[:, block])
    assert torch.equal(found, sums)


@pytest.mark.parametrize(("weights", "threads"), [("float32", 1), ("float32", 2), ("int8", 2)])
def test_tiles_change_no_bit_of_blocks(weights: str, threads: int) -> None:
    """So processors with tiles and without them are one fleet, but for attention over bfloat16 keys and values."""
    made = model("Q4_K", "Q6_K") if weights == "float32" else float32(model("Q4_1"))
    with tiles():
        tiled = engine(made, threads, weights=weights, exact=False)
    without = engine(made, weights=weights, exact=False)
    assert tiled.in_integers
    assert tiled.arithmetic == without.arithmetic
    assert torch.equal(logits(tiled), logits(without))


@pytest.mark.parametrize("threads", [1, 2])
def test_products_in_tiles_are_the_same_for_any_number_of_rows(threads: int) -> None:
    """And as near to the truth as two parts of 16 bits at least can be, where float32 has 24."""
    made = float32(model("Q4_1"))
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    with tiles():
        tiled = engine(made, threads=threads, exact=False)
    assert tiled._layers[0].down[0].arithmetic == 1
    found = logits(tiled).clone()
    exact = logits(engine(made))
    assert 0 < (found - exact).norm() < 1e-4 * exact.norm()
    truth = made.double()(torch.tensor([TOKENS])).logits[0].detach()
    rounding, distance = (float((each[: len(truth)] - truth).norm()) for each in (exact, found))
    assert 0 < distance < 60 * rounding
    for size in (1, 2, 4, 5, 9, 16, 17, 33, 40, 64):
        tiled.free("s")
        tiled.blocks.pool.evict_all()
        for at in range(0, 80, size):
            neighbours = [SessionTokens(f"n{i}", TOKENS[i : i + 5 * i + 1]) for i in range(size % 3)]
            part = SessionTokens("s", TOKENS[at : at + size])
            rows = tiled.extend([*neighbours, part]).logits[-1]
            assert torch.equal(rows[: 80 - at], found[at : min(80, at + size)])
            for each in neighbours:
                tiled.free(each.session)


def test_kernels_that_dequantise_otherwise_than_gguf_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start-up check computes its reference with them, so it would not see that."""
    quantized = random_rows("Q4_K", 8, 256, torch.Generator().manual_seed(1))
    monkeypatch.setattr(native_engine, "_compared", set[int]())
    right = dequantize(quantized)
    monkeypatch.setattr(native_engine, "_compared", set[int]())
    monkeypatch.setattr(QuantizedRows, "dequantize", lambda rows, ids: right[ids] * 1.0001)
    with pytest.raises(StartupError, match="another way than gguf"):
        dequantize(quantized)
