"""What the CUDA engine adds: graphs by number of tokens, padding that changes nothing, steps of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers import MistralForCausalLM as Mistral

from outrider.engine import SessionTokens
from outrider.engine.cuda import engine as engines
from outrider.engine.cuda.engine import CudaGraphEngine
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
    ("batch", "tokens"), [([1], 1), ([3], 4), ([16], 16), ([64], 64), ([1, 5, 2], 8), ([4] * 16, 64), ([5] * 13, 96)]
)
def test_a_step_runs_in_the_next_graph(batch: list[int], tokens: int) -> None:
    graphs = llama()
    graphs.extend([SessionTokens(str(i), TOKENS[:count]) for i, count in enumerate(batch)])
    assert list(graphs.graphs) == [(tokens, ())]


def test_the_context_does_not_choose_the_graph() -> None:
    graphs = llama()
    for cached in (255, 2100):
        prefill(graphs, "s", TOKENS[:cached])
        graphs.extend([SessionTokens("s", TOKENS[:1])])
        graphs.free("s")
    assert {tokens for tokens, _ in graphs.graphs} == {1, 64}  # 64: the end of the second prompt


@pytest.mark.parametrize("batch", [[65], [600], [100, 1, 2], [20] * 26])
def test_prompts_and_large_steps_run_without_a_graph(batch: list[int]) -> None:
    graphs = llama()
    graphs.extend([SessionTokens(str(i), TOKENS[:count]) for i, count in enumerate(batch)])
    assert list(graphs.graphs) == []


@pytest.mark.parametrize("name", MODELS)
def test_long_contexts_answer_as_the_model_does(name: str) -> None:
    """Beyond a window, over more than one range of the context, with a graph and without one."""
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
    assert list(graphs.graphs) == [(8, ()), (4, ())]


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


def test_what_a_step_left_does_not_reach_the_next() -> None:
    """The inputs are written again and again: a tree, many sessions, then few tokens."""
    graphs, fresh = llama(), llama()
    graphs.extend([SessionTokens("a", TOKENS[:4], (-1, 0, 0, 2)), SessionTokens("b", TOKENS[:3])])
    graphs.extend([SessionTokens("b", TOKENS[3:7]), SessionTokens("a", [1])])
    found = graphs.extend([SessionTokens("b", TOKENS[7:9]), SessionTokens("c", TOKENS[:1], logits_from=1)]).logits
    assert list(graphs.graphs) == [(8, ()), (4, ())]
    assert near(found[0], fresh.extend([SessionTokens("b", TOKENS[:9], logits_from=7)]).logits[0])
    assert found[1].shape == (0, VOCAB)


def test_a_step_whose_capture_fails_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_graphs_used_longest_ago_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_MAX_GRAPHS", 2)
    graphs = llama()
    for rows in (1, 2, 1, 8):
        graphs.extend([SessionTokens("s", TOKENS[:rows])])
    assert [tokens for tokens, _ in graphs.graphs] == [1, 8]


def test_plans_share_memory_with_their_model() -> None:
    """What is joined for one product must not lie in memory twice: large models fill a GPU once."""
    model = seeded(MODELS["llama"])
    before = model(torch.tensor([TOKENS[:9]])).logits
    qkv = build_spec(model).layers[0].qkv.weight
    keys = model.model.layers[0].self_attn.k_proj.weight
    assert keys.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert torch.equal(model(torch.tensor([TOKENS[:9]])).logits, before)
