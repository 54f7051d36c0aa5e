"""The default target in the blocks of its GGUF file: the bits of its float32 weights, and nearly them in AMX tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.native import NativeEngine
from outrider.models.hub import DEFAULT, locate_safetensors

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

TEXT = Path(__file__).with_name("lighthouse.txt")


def logits(dtype: str, target: str = DEFAULT) -> tuple[NativeEngine, torch.Tensor]:
    loaded = load_model(target, EngineOptions(device="cpu", dtype=dtype, kv_tokens=2048))
    assert isinstance(loaded.engine, NativeEngine)
    tokens = loaded.tokenizer.encode(TEXT.read_text())
    return loaded.engine, loaded.engine.extend([SessionTokens("text", tokens)]).logits[0].clone()


def test_blocks_are_the_float32_weights_and_tiles_come_near() -> None:
    blocks, exact = logits("float32")
    _, near = logits("auto")
    floats, same = logits("float32", str(locate_safetensors(DEFAULT, print)))
    assert torch.equal(exact, same)
    assert blocks.info.fingerprint == floats.info.fingerprint
    assert blocks.weight_bytes < floats.weight_bytes / 5  # 4 bits and two numbers for 32 weights; the head has 8 bits
    log_p, log_q = (torch.log_softmax(each.double(), dim=-1) for each in (exact, near))
    divergence = float((log_p.exp() * (log_p - log_q)).sum(dim=-1).mean())
    agreement = float((exact.argmax(dim=-1) == near.argmax(dim=-1)).float().mean())
    print(f"\nauto against float32: KL divergence {divergence:.2g}, argmax {100 * agreement:.2f} % of {len(exact)}")
    assert divergence < 1e-8
    assert agreement > 0.995
