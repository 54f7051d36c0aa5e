"""What must hold on a CUDA device: the noise is the same, and the engine answers what it answers on the CPU, fast."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.engine import Engine, SessionTokens
from outrider.engine.cuda import engine as engines
from outrider.engine.cuda.engine import CudaGraphEngine, GraphKey
from outrider.engine.interface import prefill
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.model_spec import build_spec
from outrider.engine.paged.engine import PagedEngine
from outrider.engine.transformers.attention import NAME as RAGGED_ATTENTION
from outrider.engine.transformers.engine import TransformersEngine
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation import noise
from outrider.speculation.exponential_race import shared_draw
from outrider.testing.toy_models import make_model
from tests.unit.outrider.engine.test_engine import FAMILIES, VOCAB

pytestmark = pytest.mark.gpu

PROMPT = list(range(40, 72))
LLAMA_135M = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
)
LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
_8B_NEEDS = 44 << 30  # bytes: weights, a cache, and scratch


def test_noise_has_the_same_bits_as_on_the_cpu() -> None:
    ids = torch.arange(100_000)
    keys = torch.tensor([[key - (1 << 63)] for key in (noise.key(7, noise.Use.COUPLED, p) >> 1 for p in range(4))])
    here = noise.exponentials(keys, ids)
    there = noise.exponentials(keys.cuda(), ids.cuda()).cpu()
    assert torch.allclose(here, there, rtol=1e-14, atol=0)
    assert torch.equal(here.argmin(dim=-1), there.argmin(dim=-1))


def test_engine_answers_as_on_the_cpu(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    cpu = load_model(str(folder), EngineOptions(device="cpu", dtype="float32")).engine
    gpu = load_model(str(folder), EngineOptions(device="cuda", dtype="float32")).engine
    tree = SessionTokens("s", [5, 6, 7, 8], (-1, 0, 0, 2))
    for rows in (SessionTokens("s", PROMPT), tree):
        here, there = cpu.extend([rows]).logits[0], gpu.extend([rows]).logits[0].cpu()
        assert torch.allclose(here, there, rtol=1e-3, atol=1e-3)


def test_draws_on_the_device(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    engine = load_model(str(folder), EngineOptions(device="cuda", dtype="float32")).engine
    logits = engine.extend([SessionTokens("s", PROMPT)]).logits[0]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    positions = list(range(1, len(PROMPT) + 1))
    assert shared_draw(logits, params, positions) == shared_draw(logits.cpu(), params, positions)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_fast_engine_is_the_one_that_is_taken(tmp_path: Path, dtype: str) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    options = EngineOptions(device="cuda", dtype=dtype, engine="cuda")
    assert isinstance(load_model(str(folder), options).engine, CudaGraphEngine)
    plain = EngineOptions(device="cuda", dtype=dtype, engine="transformers")
    assert isinstance(load_model(str(folder), plain).engine, TransformersEngine)


def test_int8_is_refused_on_a_gpu(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    with pytest.raises(StartupError, match="needs engine native"):
        load_model(str(folder), EngineOptions(device="cuda", quantization="int8"))


@torch.inference_mode()
def graphs_of(model: Any, kv_tokens: int = 8192) -> CudaGraphEngine:
    info = ModelInfo("m", "f", vocab_size=model.config.vocab_size, context_length=8192)
    return CudaGraphEngine(build_spec(model), info, kv_tokens=kv_tokens)


def captured(engine: CudaGraphEngine) -> list[GraphKey]:
    return [key for key, graph in engine.graphs.items() if graph.captured is not None]


def story(engine: PagedEngine) -> list[torch.Tensor]:
    """Prompts, a tree, rollback, and many sessions of different length; every step twice, to see a replay."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (60,), generator=generator).tolist()
    seen = [prefill(engine, "a", ids[:30]).clone()]
    prefill(engine, "b", ids[:5])
    for _ in range(2):
        batch = [SessionTokens("a", [1, ids[30], ids[31], 2], (-1, -1, 1, 1)), SessionTokens("b", ids[5:7])]
        seen += [logits.clone() for logits in engine.extend(batch).logits]
        engine.compact("a", 30, [1, 2])
        seen += [logits.clone() for logits in engine.extend([SessionTokens("a", ids[32:35])]).logits]
        engine.truncate("a", 30)
        engine.truncate("b", 5)
    for i in range(9):
        prefill(engine, str(i), ids[: 3 * i + 1])
    for _ in range(2):
        batch = [SessionTokens(str(i), ids[i : i + 1 + i % 4]) for i in range(9)]
        seen += [logits.clone() for logits in engine.extend(batch).logits]
        for i in range(9):
            engine.truncate(str(i), 3 * i + 1)
    return [logits.float().cpu() for logits in seen]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_on_the_cpu(family: str) -> None:
    made, config = FAMILIES[family]
    torch.manual_seed(0)
    model = made(config).eval()
    model.set_attn_implementation(RAGGED_ATTENTION)
    here = story(TransformersEngine(model, ModelInfo("m", "f", vocab_size=VOCAB), kv_tokens=1024))
    exact = graphs_of(copy.deepcopy(model).cuda(), 1024)
    for wanted, found in zip(here, story(exact), strict=True):
        assert torch.allclose(wanted, found, rtol=1e-3, atol=1e-3)
    for weight in model.parameters():  # not the buffers: frequencies stay in float32, as after loading
        weight.data = weight.data.bfloat16()
    half = story(graphs_of(model.cuda(), 1024))
    for wanted, found in zip(here, half, strict=True):
        assert float((wanted - found).norm() / wanted.norm()) < 0.05
    assert captured(exact) == list(exact.graphs) != []


def test_warm_up_leaves_nothing_to_capture_for_a_common_step() -> None:
    made, config = FAMILIES["llama"]
    engine = graphs_of(made(config).eval().cuda())
    engine.warm_up()
    before = set(captured(engine))  # the order changes: the last used is the last
    engine.extend([SessionTokens("s", [1, 2, 3])])
    assert (4, ()) in before
    assert set(captured(engine)) == before


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_without_memory_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made, config = FAMILIES["llama"]
    model = made(config).eval().cuda()
    wanted = graphs_of(model).extend([SessionTokens("s", PROMPT[:5])]).logits[0].clone()
    said: list[str] = []
    monkeypatch.setattr(engines.log, "warning", lambda event, **_: said.append(event))
    engine = graphs_of(model)
    run, calls = engine._decoder.run, []

    def fail_in_capture(*arguments: Any) -> Any:
        calls.append(1)
        if torch.cuda.is_current_stream_capturing():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return run(*arguments)

    monkeypatch.setattr(engine._decoder, "run", fail_in_capture)
    for _ in range(2):
        assert torch.allclose(engine.extend([SessionTokens("s", PROMPT[:5])]).logits[0], wanted, atol=1e-3)
        engine.truncate("s", 0)
    assert len(said) == 1
    assert captured(engine) == []
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def milliseconds(act: Callable[[], object], rounds: int = 50) -> float:
    """Median of single runs, each to its end."""
    for _ in range(5):
        act()
    taken = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        act()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def step_ms(engine: Engine, rows: int, context: int) -> float:
    """What extending by this many rows takes, the rollback included."""
    prefill(engine, "speed", [1] * context)

    def act() -> None:
        engine.extend([SessionTokens("speed", [2] * rows)])
        engine.truncate("speed", context)

    taken = milliseconds(act)
    engine.free("speed")
    return taken


@pytest.mark.timeout(600)
def test_one_stream_is_several_times_as_fast_as_eager() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LLAMA_135M, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(RAGGED_ATTENTION)
    info = ModelInfo("m", "f", vocab_size=49_152, context_length=8192)
    eager = step_ms(TransformersEngine(model, info, kv_tokens=8192), 1, 200)
    engine = graphs_of(model)
    times = {(rows, context): step_ms(engine, rows, context) for rows in (1, 8, 16) for context in (200, 900, 3900)}
    print(f"\n135M, one stream: {1000 / times[1, 200]:.0f} tokens/s with graphs, {1000 / eager:.0f} without")
    for (rows, context), taken in times.items():
        print(f"  {rows:2} rows after {context:4} tokens: {taken:.3f} ms")
    assert eager >= 5 * times[1, 200]


@pytest.mark.timeout(1200)
def test_verifying_costs_what_one_token_costs() -> None:
    """At the speed of the memory that the weights are read from."""
    if torch.cuda.mem_get_info()[0] < _8B_NEEDS:
        pytest.skip("needs 44 GiB of free GPU memory")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LLAMA_8B, dtype=torch.bfloat16).eval()
    read = sum(weight.nbytes for name, weight in model.named_parameters() if "embed" not in name)
    engine = graphs_of(model, 150_000)
    per_ms = bytes_per_ms()
    floor = read / per_ms
    for context in (200, 1900, 7000):
        times = {rows: step_ms(engine, rows, context) for rows in (1, 2, 4, 8, 16)}
        line = ", ".join(f"{rows}: {taken:.2f}" for rows, taken in times.items())
        print(f"\n8B after {context} tokens, ms by rows: {line}; floor {floor:.2f} ({per_ms / 1e9:.2f} TB/s)")
        if context == 200:
            assert times[8] <= 1.15 * times[1]
            assert times[1] <= 1.3 * floor
    for tokens in (1, 5, 9):
        many = {sessions: round(many_ms(engine, sessions, tokens), 2) for sessions in (1, 8, 32, 128)}
        print(f"8B, {tokens} tokens of each session after 1000, ms by sessions: {many}")


def bytes_per_ms() -> float:
    """How fast a copy on the device reads and writes."""
    block = torch.empty(2, 4 << 30, dtype=torch.uint8, device="cuda")
    return block.nbytes / milliseconds(lambda: block[1].copy_(block[0]), 20)


def many_ms(engine: Engine, sessions: int, tokens: int) -> float:
    names = [str(i) for i in range(sessions)]
    for name in names:
        prefill(engine, name, [3] * 1000)

    def act() -> None:
        engine.extend([SessionTokens(name, [2] * tokens) for name in names])
        for name in names:
            engine.truncate(name, 1000)

    taken = milliseconds(act, 20)
    for name in names:
        engine.free(name)
    return taken
