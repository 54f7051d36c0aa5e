"""Golden bits of the CPU kernels: a change of any bit must raise the kernels' version."""

from __future__ import annotations

import hashlib
import math
from itertools import count
from pathlib import Path

import pytest
import torch

from outrider.base.config import home
from outrider.engine import SessionTokens
from outrider.engine.model_spec import Cosines, Layer, Linear, ModelSpec, Norm
from outrider.engine.native import NativeEngine, build
from outrider.protocol.fleet import ModelInfo
from tests.unit.outrider.engine.native.tiles import tiles

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 99, 72, 100, 6, 2, 20
TOKENS = [i * i * 31 % VOCAB for i in range(70)]

# What `outrider_arithmetic` says, and digests of logits. Both change together or not at all.
VERSION = 1
WHOLE_VECTORS = "silu float32, hidden states of whole vectors"  # as of nearly all real models
GOLDEN = {
    "silu float32": "fd49f6cabf79a588",
    "silu bfloat16": "b8617e390d268148",
    "silu int8": "549d6f6b55d7d21b",
    "gelu_tanh float32": "c8be178d8bb8f5ce",
    "gelu_tanh bfloat16": "2eed8468a6d69b8a",
    "gelu_tanh int8": "117e4a25814ac4eb",
    "gelu float32": "0e4b786999f6e182",
    "gelu bfloat16": "654c7df8459a623f",
    "gelu int8": "a5d9df19f6d19237",
    "relu float32": "7eb71d0efb094462",
    "relu bfloat16": "cb620e50eca3bec7",
    "relu int8": "996d3f47a4ef4d9b",
    "silu bfloat16 cache": "142e79e45944576e",
    WHOLE_VECTORS: "46fbbfdd017a52bb",
}
# The same for attention in AMX tiles, by its name in the fingerprint.
TILED_CACHE, TILED_GOLDEN = "bfloat16 cache in tiles 1", "2e9a0d00b7be6f26"


class Numbers:
    """Weights made with integers and a division by a power of two: no generator whose stream a release may change."""

    def __init__(self) -> None:
        self._turns = count(1)

    def __call__(self, *shape: int, about: float = 0.0) -> torch.Tensor:
        made = (torch.arange(math.prod(shape)) + next(self._turns) * 7919) * 2_654_435_761 % 1_000_003 % 4001 - 2000
        return (made.float() / 8192 + about).view(shape)


def rotation(positions: torch.Tensor) -> Cosines:
    """Of no true angle, since cosines are torch's. Each half of a head's turned dimensions has the same."""
    parts = (positions[:, None] * torch.arange(1, 6) * 37 % 129).float() / 128
    return torch.cat([parts, parts], dim=1), torch.cat([1 - parts, 1 - parts], dim=1)


def model(activation: str, hidden: int = HIDDEN) -> ModelSpec:
    """With `silu` as in Qwen with a window, with `gelu_tanh` as in Gemma 2, with `gelu` as in GPT-NeoX."""
    numbers = Numbers()
    layered, gated = activation == "gelu", activation != "gelu"
    capped = activation == "gelu_tanh"

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(numbers(outputs, inputs), numbers(outputs) if layered else None)

    def norm(width: int = hidden) -> Norm:
        return Norm("layer" if layered else "rms", numbers(width, about=1.0), 1e-5, numbers(width) if layered else None)

    layers = tuple(
        Layer(
            qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, hidden),
            out=linear(hidden, HEADS * HEAD_DIM),
            up=linear(INNER * (1 + gated), hidden),
            down=linear(hidden, INNER),
            scale=0.25,
            attention_in=norm(),
            mlp_in=norm(),
            attention_out=norm() if capped else None,
            mlp_out=norm() if capped else None,
            query=norm(HEAD_DIM) if activation == "silu" else None,
            key=norm(HEAD_DIM) if activation == "silu" else None,
            window=window,
            rope=0,
        )
        for window in (None, 40)
    )
    table = numbers(VOCAB, hidden)
    return ModelSpec(
        layers=layers,
        embed=lambda ids, _: table[ids],
        rotations=(rotation,),
        final=norm(),
        head=Linear(numbers(VOCAB, hidden)),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        gated=gated,
        activation=activation,
        parallel=layered,
        softcap=5.0 if capped else 0.0,
        logit_softcap=3.0 if capped else 0.0,
    )


def digests() -> dict[str, str]:
    found = {}
    for activation in ("silu", "gelu_tanh", "gelu", "relu"):
        for kind in ("float32", "bfloat16", "int8", *["bfloat16 cache"] * (activation == "silu")):
            runs = engine(activation, kind.split()[0])
            runs.use_cache(torch.bfloat16 if "cache" in kind else torch.float32)
            found[f"{activation} {kind}"] = digest_of(runs)
    found[WHOLE_VECTORS] = digest_of(engine("silu", "float32", hidden=64))
    return found


def engine(activation: str, weights: str, exact: bool = True, hidden: int = HIDDEN) -> NativeEngine:
    info = ModelInfo("m", "f", vocab_size=VOCAB)
    return NativeEngine(model(activation, hidden), info, kv_tokens=256, weights=weights, threads=1, exact=exact)


def digest_of(runs: NativeEngine) -> str:
    digest = hashlib.sha256()
    for rows in (SessionTokens("s", TOKENS), SessionTokens("s", [1, 2, 3, 4, 5], (-1, -1, 0, 1, 1))):
        logits = runs.extend([rows]).logits[0]
        assert logits.isfinite().all()
        assert logits.std() > 0.1
        digest.update(logits.numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]


LEVELS = ["native"] + [level for level, needed in build.levels().items() if torch.cpu.get_capabilities().get(needed)]


@pytest.mark.parametrize("level", LEVELS)
def test_bits_change_only_with_the_kernels_version(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers of one fingerprint stand in for each other, and the version is all that it says of the kernels."""
    built = build.load(build.compile_for(level, home() / "kernels"))
    if built.outrider_arithmetic() < 0:
        pytest.skip("this processor does not fuse multiply and add: its bits are its own, and its version says so")
    monkeypatch.setattr("outrider.engine.native.engine.library", lambda: built)
    found = digests()
    assert (built.outrider_arithmetic(), found) == (VERSION, GOLDEN), (
        "the kernels' results have other bits, or another version, than those kept here: raise ARITHMETIC in "
        f"forward.c, and put the new version and digests into {Path(__file__).name}: {found}"
    )


def test_bits_of_attention_in_tiles_change_only_with_its_version() -> None:
    with tiles():
        runs = engine("silu", "float32", exact=False)
    runs.use_cache(torch.bfloat16)
    digest = digest_of(runs)
    assert f", {TILED_CACHE}, " in runs.arithmetic, "raise the version in engine.py together with the digest here"
    assert digest == TILED_GOLDEN, "other bits: raise the version of the cache in tiles in engine.py, and put both here"
