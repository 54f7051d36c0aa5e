"""A guess whose embedding is NaN or infinite: rows that do not see it keep their bits, those that see it are NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from outrider.engine import SessionTokens
from outrider.engine.cuda.engine import CudaGraphEngine
from outrider.engine.model_spec import build_spec
from outrider.engine.paged.engine import PagedEngine
from outrider.engine.transformers.engine import TransformersEngine
from outrider.protocol.fleet import ModelInfo

VOCAB = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "window": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=40)),
    "caps": (Gemma2ForCausalLM, Gemma2Config(**SHAPE, head_dim=16, sliding_window=40)),
}
BAD = 7
TOKENS = [token + 8 for token in torch.randint(VOCAB - 8, (200,), generator=torch.Generator().manual_seed(3)).tolist()]


def engine_of(kind: str, model: str, bad: float | None) -> PagedEngine:
    """With room for few tokens, so that sessions soon get the pages of others."""
    make, config = MODELS[model]
    torch.manual_seed(0)
    made = make(config).eval()
    info = ModelInfo("m", "f", vocab_size=VOCAB)
    with torch.no_grad():
        if bad is not None:
            made.get_input_embeddings().weight[BAD, 3] = bad
        if kind == "graphs":
            return CudaGraphEngine(build_spec(made), info, kv_tokens=256)
    return TransformersEngine(made, info, kv_tokens=256)


@pytest.fixture(params=["graphs", "transformers"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("model", MODELS)
def test_a_guess_that_is_not_finite_changes_no_other_row(kind: str, model: str, bad: float) -> None:
    """The same steps with a model whose embeddings are all finite say what the bits must be."""
    spoilt, sound = engine_of(kind, model, bad), engine_of(kind, model, None)

    def step(*rows: SessionTokens, sees: tuple[int, ...]) -> None:
        found, wanted = (torch.cat(list(engine.extend(rows).logits)) for engine in (spoilt, sound))
        for row in range(len(found)):
            if row in sees:
                assert found[row].isnan().all()
            else:
                assert torch.equal(found[row], wanted[row])

    for base in (1, 31, 63):
        step(SessionTokens("tree", TOKENS[:base]), sees=())
        right = TOKENS[base : base + 2]
        tree = SessionTokens("tree", [BAD, right[0], BAD, right[1], 5], (-1, -1, 1, 1, 0))
        step(tree, SessionTokens("beside", TOKENS[:3]), sees=(0, 2, 4))
        for engine in (spoilt, sound):
            engine.compact("tree", base, [1, 3])
        step(SessionTokens("tree", [TOKENS[base + 2], BAD, BAD, 3]), sees=(1, 2, 3))
        for engine in (spoilt, sound):
            engine.truncate("tree", base + 3)
        step(SessionTokens("tree", [3]), SessionTokens("beside", [4, 5]), sees=())
        step(SessionTokens("long", [*TOKENS[:79], BAD]), sees=(79,))
        step(SessionTokens("long", [6]), SessionTokens("tree", [2, 3]), sees=(0,))  # of a session that went on with it
        for session in ("tree", "beside", "long"):
            for engine in (spoilt, sound):
                engine.free(session)
                engine.blocks.pool.evict_all()
    step(SessionTokens("later", TOKENS[:190]), sees=())
    step(SessionTokens("later", TOKENS[:3]), sees=())


@pytest.mark.parametrize("model", ["llama", "caps"])
def test_a_prompt_that_is_not_finite_leaves_its_sound_beginning_to_others(kind: str, model: str) -> None:
    """Nobody asks for the logits of its rows, but their keys and values are offered to whoever begins alike."""
    spoilt, sound = engine_of(kind, model, float("nan")), engine_of(kind, model, None)
    found = []
    for engine in (spoilt, sound):
        engine.extend([SessionTokens("first", [*TOKENS[:70], BAD], logits_from=71)])
        engine.free("first")
        assert engine.match_prefix("second", TOKENS[:70]) == 64
        found.append(engine.extend([SessionTokens("second", TOKENS[64:70])]).logits[0])
    assert torch.equal(*found)
