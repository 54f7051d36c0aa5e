"""Weights in the blocks of a GGUF file give the bits of the same weights in float32."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.base.config import home
from outrider.engine import SessionTokens
from outrider.engine.model_spec import build_spec
from outrider.engine.native import NativeEngine, build
from outrider.models.gguf import QuantizedRows, read_embeddings_from_rows
from outrider.protocol.fleet import ModelInfo

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
LEVELS = [level for level, needed in build._LEVELS.items() if torch.cpu.get_capabilities().get(needed)]
VOCAB = 208  # a multiple of 16 and of no panel
TOKENS = torch.randint(VOCAB, (120,), generator=torch.Generator().manual_seed(3)).tolist()


def random_rows(kind: str, outputs: int, inputs: int, generator: torch.Generator) -> QuantizedRows:
    """Random blocks, with scales that are small numbers."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    rows = torch.randint(256, (outputs, inputs // block, size), dtype=torch.uint8, generator=generator)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}[kind]
    for at in halves:
        rows[:, :, at + 1] = rows[:, :, at + 1] % 8 + (8 if kind == "Q8_0" or "K" in kind else 24) + 128 * (at == 2)
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


def engine(made: Any, threads: int = 1) -> NativeEngine:
    return NativeEngine(build_spec(made), ModelInfo("m", "f", vocab_size=VOCAB), kv_tokens=1024, threads=threads)


def logits(runs: NativeEngine) -> torch.Tensor:
    whole = runs.extend([SessionTokens("s", TOKENS)]).logits[0].clone()
    tree = runs.extend([SessionTokens("s", [1, 2, 3, 4, 5], (-1, -1, 0, 1, 1))]).logits[0]
    return torch.cat([whole, tree])


def float32(made: Any) -> Any:
    for module in made.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            del module.weight.quantized
    return made


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_blocks_give_the_bits_of_float32(kind: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build.load(build.compile_for(level, home() / "kernels"))
    monkeypatch.setattr("outrider.engine.native.engine.library", lambda: built)
    made = model("Q4_K", "Q6_K") if kind == "mixed" else model(kind)
    blocks = engine(made, threads=2 if kind == "Q4_1" else 1)
    assert blocks._layers[0].down.kind > 2
    found = logits(blocks).clone()
    for size in (1, 2, 13, 40):
        blocks.free("s")
        blocks.blocks.pool.evict_all()
        parts = [SessionTokens("s", TOKENS[at : at + size]) for at in range(0, 80, size)]
        pieces = [blocks.extend([part]).logits[0].clone() for part in parts]
        assert torch.equal(torch.cat(pieces)[:80], found[:80])
    assert torch.equal(found, logits(engine(float32(made))))


def test_an_embedding_dequantises_the_rows_that_it_is_asked_for() -> None:
    embeddings = model("Q4_1").get_input_embeddings()
    ids = torch.tensor([[3, 1], [3, 207]])
    before = embeddings(ids)
    read_embeddings_from_rows(embeddings)
    assert torch.equal(embeddings(ids), before)
    assert embeddings.weight.numel() < before.numel() + 1
