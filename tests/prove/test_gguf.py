"""The default target in its GGUF file's blocks: the bits of its float32 weights; nearly them in integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.model_spec import build_spec
from outrider.engine.native import NativeEngine, dequantize
from outrider.models.hub import DEFAULT, fetch_default, locate_safetensors
from outrider.models.in_place import load_in_place
from outrider.protocol.fleet import ModelInfo

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

TEXT = Path(__file__).with_name("lighthouse.txt")


def logits(dtype: str, target: str = DEFAULT, kv_dtype: str = "auto") -> tuple[NativeEngine, torch.Tensor]:
    loaded = load_model(target, EngineOptions(device="cpu", dtype=dtype, kv_dtype=kv_dtype, kv_tokens=2048))
    assert isinstance(loaded.engine, NativeEngine)
    tokens = loaded.tokenizer.encode(TEXT.read_text())
    return loaded.engine, loaded.engine.extend([SessionTokens("text", tokens)]).logits[0].clone()


def compare(exact: torch.Tensor, near: torch.Tensor) -> tuple[float, float]:
    """Return the KL divergence and the share of equal argmaxes."""
    log_p, log_q = (torch.log_softmax(each.double(), dim=-1) for each in (exact, near))
    divergence = float((log_p.exp() * (log_p - log_q)).sum(dim=-1).mean())
    return divergence, float((exact.argmax(dim=-1) == near.argmax(dim=-1)).float().mean())


def test_blocks_are_the_float32_weights_and_the_default_arithmetic_comes_near() -> None:
    blocks, exact = logits("float32")
    default, near = logits("auto", kv_dtype="float32")
    floats, same = logits("float32", str(locate_safetensors(DEFAULT, print)))
    assert torch.equal(exact, same)
    assert blocks.info.fingerprint == floats.info.fingerprint
    assert blocks.weight_bytes < floats.weight_bytes / 5  # 4 bits and two numbers for 32 weights; the head has 8 bits
    divergence, agreement = compare(exact, near)
    print(f"\nauto against float32: KL divergence {divergence:.2g}, argmax {100 * agreement:.2f} % of {len(exact)}")
    assert default.in_integers
    assert divergence < 1e-7
    assert agreement > 0.995


def test_the_text_is_as_likely_in_every_format() -> None:
    """Against float32 weights: blocks in the default arithmetic (integers), int8 weights, bfloat16 caches."""
    folder = fetch_default(print)
    tokens = AutoTokenizer.from_pretrained(folder).encode(TEXT.read_text())
    ways = {
        "float32": ("float32", False, "float32"),
        "blocks, default": ("float32", True, "float32"),
        "int8": ("int8", False, "float32"),
        "int8, default": ("int8", True, "float32"),
        "bfloat16 cache": ("float32", False, "bfloat16"),
        "bfloat16 cache, default": ("float32", True, "bfloat16"),
    }
    likely, found = {}, {}
    for name, (weights, default, cache) in ways.items():
        model = load_in_place(folder, dequantize, AutoConfig.from_pretrained(folder))
        assert model is not None
        with torch.inference_mode():
            info = ModelInfo("m", "f", vocab_size=model.config.vocab_size)
            engine = NativeEngine(build_spec(model), info, kv_tokens=2048, weights=weights, exact=not default)
            engine.use_cache(getattr(torch, cache))
            logits = found[name] = engine.extend([SessionTokens("text", tokens)]).logits[0].clone()
            likely[name] = float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:])))
    print(f"\nmean negative log-likelihood of {len(tokens)} tokens: {likely}")
    for name in ("bfloat16 cache", "bfloat16 cache, default"):
        divergence, agreement = compare(found["float32"], found[name])
        print(f"{name} against float32: KL divergence {divergence:.2g}, argmax {100 * agreement:.2f} %")
        assert divergence < 2e-4
        assert agreement > 0.99
        assert abs(likely[name] / likely["float32"] - 1) < 1e-3
    assert abs(likely["blocks, default"] / likely["float32"] - 1) < 1e-5
    assert max(likely["int8"], likely["int8, default"]) < 1.01 * likely["float32"]
