"""An 8B Llama in Q4_K_M: how fast it loads, and how its steps compare with merely reading its bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.bench.engine.forward_passes import _memory_read
from outrider.engine.interface import SessionTokens, prefill
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.native import NativeEngine
from tests.gguf_files import Shape, q4_k_m, write_gguf

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]

EIGHT_BILLION = Shape(
    hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128_256, tied=False
)
CONTEXT = 256
ROUNDS = 5


def test_eight_billion_weights(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "large.gguf", EIGHT_BILLION, q4_k_m)
    loaded_s = []
    for _ in range(2):  # the first start checks the kernels against transformers, and records that
        engine = None
        gc.collect()
        started = time.monotonic()
        engine = load_model(str(file), EngineOptions(device="cpu", kv_tokens=2 * CONTEXT, prefix_tokens=0)).engine
        loaded_s.append(time.monotonic() - started)
    assert isinstance(engine, NativeEngine)
    prefill(engine, "one", [7 * i % 1000 for i in range(CONTEXT)])

    def step(tokens: int) -> Callable[[], None]:
        batch = [SessionTokens("one", range(1000, 1000 + tokens))]

        def run() -> None:
            engine.extend(batch)

        return run

    read_bytes, read = _memory_read(engine.device)
    steps: dict[str, Callable[[], object]] = {"read": read, "1": step(1), "9": step(9)}
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, run in steps.items():
            begun = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begun)
            engine.truncate("one", CONTEXT)
    allowed = best["read"] * engine.weight_bytes / read_bytes
    share, flatness = allowed / best["1"], best["9"] / best["1"]
    size = file.stat().st_size
    file.unlink()  # pytest would keep it
    print(
        f"{size / 1e9:.2f} GB in the file, {engine.weight_bytes / 1e9:.2f} read for a token; "
        f"loaded in {loaded_s[0]:.0f} s, then in {loaded_s[1]:.0f} s; "
        f"{1000 * best['1']:.0f} ms a token, {share:.2f} of what memory allows; "
        f"nine tokens {flatness:.2f} times one"
    )
    assert loaded_s[1] < 35
    assert share > 0.5
    assert flatness < 3  # nine tokens are nine times the work of the products
