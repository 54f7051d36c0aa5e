"""What the engine of fixed shapes adds: buckets, padding that changes nothing, steps of any size, many sessions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers import MistralForCausalLM as Mistral

from outrider.engine import SessionTokens
from outrider.engine.cuda import engine as engines
from outrider.engine.cuda.engine import CudaGraphEngine, GraphShape
from outrider.engine.interface import prefill
from outrider.engine.model_spec import build_spec
from outrider.protocol.fleet import ModelInfo

VOCAB = 128
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
TOKENS = torch.randint(VOCAB, (2200,), generator=torch.Generator().manual_seed(3)).tolist()
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "sliding window": lambda: Mistral(MistralConfig(**SMALL, sliding_window=300)),
    "capped scores": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, sliding_window=300)),
}


def seeded(make: Any) -> Any:
    torch.manual_seed(1)
    return make().eval()


@torch.inference_mode()
def engine(model: Any, kv_tokens: int = 4096, context: int = 4096) -> CudaGraphEngine:
    info = ModelInfo("m", "f", vocab_size=VOCAB, context_length=context)
    return CudaGraphEngine(build_spec(model), info, kv_tokens=kv_tokens)


def llama(**options: int) -> CudaGraphEngine:
    return engine(seeded(MODELS["llama"]), **options)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(found, wanted, atol=5e-5, rtol=1e-3))


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ([1], GraphShape(1, 1, 256)),
        ([3], GraphShape(1, 4, 256)),
        ([16], GraphShape(1, 16, 256)),
        ([64], GraphShape(1, 64, 256)),
        ([1, 5, 2], GraphShape(4, 8, 256)),
        ([4] * 16, GraphShape(16, 4, 256)),
    ],
)
def test_a_step_runs_in_the_next_bucket(batch: list[int], shape: GraphShape) -> None:
    graphs = llama()
    graphs.extend([SessionTokens(str(i), TOKENS[:count]) for i, count in enumerate(batch)])
    assert list(graphs.buckets) == [shape]


@pytest.mark.parametrize(("cached", "context"), [(255, 256), (256, 512), (511, 512), (512, 1024)])
def test_contexts_have_buckets_too(cached: int, context: int) -> None:
    graphs = llama()
    prefill(graphs, "s", TOKENS[:cached])
    graphs.extend([SessionTokens("s", TOKENS[:1])])
    assert list(graphs.buckets) == [GraphShape(1, 1, context)]


@pytest.mark.parametrize("batch", [[65], [600], [100, 1, 2], [5] * 13])
def test_steps_of_many_rows_run_without_a_bucket(batch: list[int]) -> None:
    graphs = llama()
    graphs.extend([SessionTokens(str(i), TOKENS[:count]) for i, count in enumerate(batch)])
    assert list(graphs.buckets) == []


@pytest.mark.parametrize("name", MODELS)
def test_long_contexts_answer_as_the_model_does(name: str) -> None:
    """Beyond a window, over more than one share of the context, in a bucket and without one."""
    model = seeded(MODELS[name])
    with torch.no_grad():
        truth = model(torch.tensor([TOKENS])).logits[0]
    graphs = engine(model)
    assert near(prefill(graphs, "s", TOKENS[:1900]), truth[1899])
    assert near(graphs.extend([SessionTokens("s", TOKENS[1900:1908])]).logits[0], truth[1900:1908])
    wrong = (TOKENS[1908] + 1) % VOCAB
    tree = SessionTokens("s", [wrong, *TOKENS[1908:1911]], (-1, -1, 1, 2))
    assert near(graphs.extend([tree]).logits[0][1:], truth[1908:1911])
    graphs.compact("s", 1908, [1, 2, 3])
    assert near(graphs.extend([SessionTokens("s", TOKENS[1911:2011])]).logits[0], truth[1911:2011])
    assert list(graphs.buckets) == [GraphShape(1, 8, 2048), GraphShape(1, 4, 2048)]


@pytest.mark.parametrize("name", MODELS)
def test_others_and_padding_change_nothing(name: str) -> None:
    """The same rows alone, among short and long sessions, and beside a prompt."""
    model = seeded(MODELS[name])
    rows = SessionTokens("s", TOKENS[400:403], (-1, 0, 0))
    alone = engine(model)
    prefill(alone, "s", TOKENS[:400])
    wanted = alone.extend([rows]).logits[0].clone()
    for others in ([[7]], [TOKENS[:9], [1], [2] * 5], [TOKENS[:300], [3]]):
        graphs = engine(model)
        prefill(graphs, "s", TOKENS[:400])
        batch = [SessionTokens(f"other {i}", tokens) for i, tokens in enumerate(others)]
        assert near(graphs.extend([*batch, rows]).logits[-1], wanted)


def test_sessions_that_do_not_fit_together_attend_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        graphs = llama()
        for i in range(6):
            prefill(graphs, str(i), TOKENS[i : 50 * i + 1 + i])
        return graphs.extend([SessionTokens(str(i), TOKENS[:3], logits_from=i % 3) for i in (3, 0, 5, 1, 4, 2)]).logits

    wanted = [logits.clone() for logits in run()]
    monkeypatch.setattr(engines, "_MAX_COPIED_BYTES", 200_000)
    assert all(near(found, logits) for found, logits in zip(run(), wanted, strict=True))


def test_what_a_step_left_does_not_reach_the_next() -> None:
    """A bucket's inputs are written again and again: a tree, many sessions, then one row."""
    graphs, fresh = llama(), llama()
    graphs.extend([SessionTokens("a", TOKENS[:4], (-1, 0, 0, 2)), SessionTokens("b", TOKENS[:3])])
    graphs.extend([SessionTokens("b", TOKENS[3:7]), SessionTokens("a", [1])])
    found = graphs.extend([SessionTokens("b", TOKENS[7:9]), SessionTokens("c", TOKENS[:1], logits_from=1)]).logits
    assert list(graphs.buckets) == [GraphShape(2, 4, 256), GraphShape(2, 2, 256)]
    assert near(found[0], fresh.extend([SessionTokens("b", TOKENS[:9], logits_from=7)]).logits[0])
    assert found[1].shape == (0, VOCAB)


def test_a_bucket_without_a_graph_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def no_memory() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", no_memory)
    monkeypatch.setattr(engines.log, "warning", lambda event, **_: said.append(event))
    graphs, plain = llama(), llama()
    monkeypatch.setattr(graphs, "_stream", "a stream")
    monkeypatch.setattr(graphs, "_memory", (0, 0))
    for start in (0, 3):
        rows = [SessionTokens("s", TOKENS[start : start + 3])]
        assert near(graphs.extend(rows).logits[0], plain.extend(rows).logits[0])
    assert said == ["graph capture failed, steps are slower"]


def test_the_buckets_used_longest_ago_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_MAX_BUCKETS", 2)
    graphs = llama()
    for rows in (1, 2, 1, 8):
        graphs.extend([SessionTokens("s", TOKENS[:rows])])
    assert [shape.tokens for shape in list(graphs.buckets)] == [1, 8]


def test_plans_share_memory_with_their_model() -> None:
    """What is joined for one product must not lie in memory twice: large models fill a GPU once."""
    model = seeded(MODELS["llama"])
    before = model(torch.tensor([TOKENS[:9]])).logits
    qkv = build_spec(model).layers[0].qkv.weight
    keys = model.model.layers[0].self_attn.k_proj.weight
    assert keys.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert torch.equal(model(torch.tensor([TOKENS[:9]])).logits, before)
