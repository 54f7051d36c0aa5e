"""The engine answers what the model itself answers: chains, trees, several sessions, rollback; common families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from outrider.engine import Rows, TransformersEngine, attention
from outrider.engine.interface import prefill
from outrider.engine.load import load_model
from outrider.errors import ModelMismatch, StartupError
from outrider.messages import ModelInfo
from tests.tiny import make_model

VOCAB = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**GROUPED)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**GROUPED)),
    "mistral, sliding window": (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=6)),
    "gemma2, capped scores": (Gemma2ForCausalLM, Gemma2Config(**GROUPED, head_dim=16, sliding_window=8)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    ),
    "gpt-neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE)),
    "phi": (PhiForCausalLM, PhiConfig(**SHAPE)),
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def pair(request: pytest.FixtureRequest) -> tuple[TransformersEngine, list[int], torch.Tensor]:
    """An engine, forty tokens, and the model's own logits for them.  # [40, vocab]"""
    torch.manual_seed(0)
    kind, config = request.param
    config._attn_implementation = "eager"
    model = kind(config).eval()
    ids = torch.randint(0, VOCAB, (1, 40))
    with torch.no_grad():
        truth = model(ids).logits[0]
    model.set_attn_implementation(attention.NAME)
    return TransformersEngine(model, ModelInfo("m", "f")), ids[0].tolist(), truth


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(found, wanted, atol=2e-5))


def test_sessions_trees_and_rollback(pair: tuple[TransformersEngine, list[int], torch.Tensor]) -> None:
    engine, ids, truth = pair
    first, second = engine.extend([Rows("a", ids[:13]), Rows("b", ids[:5])]).logits
    assert near(first, truth[:13])
    assert near(second, truth[:5])
    wrong = (ids[13] + 1) % VOCAB
    # Two guesses for one position; the right one has two children, of which one is right.
    tree = Rows("a", [wrong, ids[13], ids[14], wrong], (-1, -1, 1, 1))
    branches, chain = engine.extend([tree, Rows("b", ids[5:20])]).logits
    assert near(branches[1], truth[13])
    assert near(branches[2], truth[14])
    assert near(chain, truth[5:20])
    engine.keep("a", 13, [1, 2])
    engine.truncate("b", 10)
    engine.fork("b", "c")
    assert (engine.length("a"), engine.length("b"), engine.length("c")) == (15, 10, 10)
    a, b, c = engine.extend(
        [Rows("a", ids[15:30], logits_from=14), Rows("b", ids[10:11]), Rows("c", ids[10:12])]
    ).logits
    assert near(a[0], truth[29])
    assert near(b[0], truth[10])
    assert near(c, truth[10:12])
    for session in ("a", "b", "c", "never seen"):
        engine.free(session)
    assert engine.cached_tokens == 0


def test_prefill_in_pieces(pair: tuple[TransformersEngine, list[int], torch.Tensor]) -> None:
    engine, ids, truth = pair
    assert near(prefill(engine, "s", ids, chunk=7), truth[-1])
    assert engine.length("s") == len(ids)


def test_a_piece_of_a_prompt_wants_no_logits() -> None:
    config = LlamaConfig(**GROUPED)
    config._attn_implementation = attention.NAME
    engine = TransformersEngine(LlamaForCausalLM(config).eval(), ModelInfo("m", "f"))
    assert engine.extend([Rows("s", [1, 2, 3], logits_from=3)]).logits[0].shape == (0, VOCAB)


def test_features_are_what_the_head_sees() -> None:
    config = LlamaConfig(**GROUPED)
    config._attn_implementation = attention.NAME
    model = LlamaForCausalLM(config).eval()
    done = TransformersEngine(model, ModelInfo("m", "f")).extend([Rows("s", [1, 2, 3])], features=True)
    assert done.features is not None
    with torch.no_grad():
        assert near(model.lm_head(done.features[0]), done.logits[0])


def test_a_model_that_keeps_other_state_is_refused() -> None:
    """One whose layers do not all go through the attention interface could not be rolled back."""
    config = LlamaConfig(**GROUPED)
    config._attn_implementation = "eager"
    engine = TransformersEngine(LlamaForCausalLM(config).eval(), ModelInfo("m", "f"))
    with pytest.raises(ModelMismatch, match="0 of 3 layers"):
        engine.extend([Rows("s", [1, 2, 3])])


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    one = load_model(str(make_model(tmp_path / "one", seed=1)), device="cpu").engine.info
    same = load_model(str(make_model(tmp_path / "same", seed=1)), device="cpu").engine.info
    other = load_model(str(make_model(tmp_path / "other", seed=2)), device="cpu").engine.info
    half = load_model(str(tmp_path / "one"), device="cpu", dtype="bfloat16").engine.info
    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, other.fingerprint, half.fingerprint}) == 3
    assert one.vocabulary_digest == other.vocabulary_digest
    assert (one.name, one.dtype, one.context_length) == ("one", "float32", 2048)


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("/nowhere/at/all", {}, "target"),
        ("{tmp}", {}, "target"),
        ("{model}", {"dtype": "float8"}, "dtype"),
        ("{model}", {"device": "abacus"}, "device"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, name: str, options: dict[str, str], field: str) -> None:
    model = make_model(tmp_path / "model", seed=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartupError) as caught:
        load_model(name.format(tmp=tmp_path / "empty", model=model), **{"device": "cpu"} | options)
    assert caught.value.field == field
