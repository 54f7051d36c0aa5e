"""The engine answers what the model itself answers: chains, trees, several sessions, rollback; common families."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.engine import SessionTokens
from outrider.engine.cuda.engine import CudaGraphEngine
from outrider.engine.interface import prefill
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.model_spec import UnsupportedModel, build_spec
from outrider.engine.native import NativeEngine
from outrider.engine.paged.engine import PagedEngine
from outrider.engine.transformers.attention import NAME as RAGGED_ATTENTION
from outrider.engine.transformers.engine import TransformersEngine
from outrider.engine.transformers.hidden_states import StateHooks
from outrider.protocol.errors import ModelMismatch, StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.testing.toy_models import make_model
from tests.architectures import tiny_model

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
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GROUPED, head_dim=24)),
    "mistral, sliding window": (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=6)),
    "gemma2, capped scores": (Gemma2ForCausalLM, Gemma2Config(**GROUPED, head_dim=16, sliding_window=8)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    ),
    "gemma": (GemmaForCausalLM, GemmaConfig(**GROUPED, head_dim=16)),
    "gemma3, two rotations": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **GROUPED,
            head_dim=16,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "gpt-neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE)),
    "gpt-neox, one after the other": (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE, use_parallel_residual=False)),
    "phi": (PhiForCausalLM, PhiConfig(**SHAPE)),
    "phi3": (Phi3ForCausalLM, Phi3Config(**GROUPED)),
}
KV_TOKENS = 1024


Pair = tuple[PagedEngine, list[int], torch.Tensor]


def engine_of(kind: str, model: Any) -> PagedEngine:
    info = ModelInfo("m", "f", vocab_size=VOCAB)
    if kind == "native":
        return NativeEngine(build_spec(model), info, kv_tokens=KV_TOKENS)
    if kind == "graphs":
        with torch.inference_mode():
            return CudaGraphEngine(build_spec(model), info, kv_tokens=KV_TOKENS)
    model.set_attn_implementation(RAGGED_ATTENTION)
    return TransformersEngine(model, info, kv_tokens=KV_TOKENS)


@pytest.fixture(params=["native", "graphs", "transformers"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def modelled(request: pytest.FixtureRequest, kind: str) -> tuple[PagedEngine, list[int], Any]:
    """An engine, forty tokens, and what the model itself says to them."""
    torch.manual_seed(0)
    made, config = request.param
    config._attn_implementation = "eager"
    model = made(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms begin as zeros and ones, which would hide a mistake
            weight.add_(torch.randn_like(weight) * 0.05)
    ids = torch.randint(0, VOCAB, (1, 40))
    with torch.no_grad():
        truth = model(ids, output_hidden_states=True)
    return engine_of(kind, model), ids[0].tolist(), truth


@pytest.fixture
def pair(modelled: tuple[PagedEngine, list[int], Any]) -> Pair:
    """An engine, forty tokens, and the model's own logits for them.  # [40, vocab]"""
    engine, ids, truth = modelled
    return engine, ids, truth.logits[0]


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(found, wanted, atol=2e-5, rtol=1e-4))


def test_sessions_trees_and_rollback(pair: Pair) -> None:
    engine, ids, truth = pair
    first, second = engine.extend([SessionTokens("a", ids[:13]), SessionTokens("b", ids[:5])]).logits
    assert near(first, truth[:13])
    assert near(second, truth[:5])
    wrong = (ids[13] + 1) % VOCAB
    # Two guesses for one position; the right one has two children, of which one is right.
    tree = SessionTokens("a", [wrong, ids[13], ids[14], wrong], (-1, -1, 1, 1))
    branches, chain = engine.extend([tree, SessionTokens("b", ids[5:20])]).logits
    assert near(branches[1], truth[13])
    assert near(branches[2], truth[14])
    assert near(chain, truth[5:20])
    engine.compact("a", 13, [1, 2])
    engine.truncate("b", 10)
    assert (engine.length("a"), engine.length("b")) == (15, 10)
    a, b = engine.extend([SessionTokens("a", ids[15:30], logits_from=14), SessionTokens("b", ids[10:12])]).logits
    assert near(a[0], truth[29])
    assert near(b, truth[10:12])
    for session in ("a", "b", "never seen"):
        engine.free(session)
    assert engine.blocks.pool.num_used == 0


def test_prefill_in_pieces(pair: Pair) -> None:
    engine, ids, truth = pair
    assert near(prefill(engine, "s", ids, chunk=7), truth[-1])
    assert engine.length("s") == len(ids)


def small(kind: str) -> PagedEngine:
    torch.manual_seed(1)
    return engine_of(kind, LlamaForCausalLM(LlamaConfig(**GROUPED)).eval())


def test_shared_blocks_are_copied_before_they_are_written(kind: str) -> None:
    engine, fresh = small(kind), small(kind)
    ids = [(7 * i + 3) % VOCAB for i in range(40)]
    prefill(engine, "a", ids)
    engine.extend([SessionTokens("a", [1])])  # its first block is full and indexed
    engine.truncate("a", 20)
    found = engine.extend([SessionTokens("a", [2])]).logits[0].clone()
    assert near(found[0], prefill(fresh, "a", [*ids[:20], 2]))
    assert engine.match_prefix("b", ids) == 32
    found = engine.extend([SessionTokens("b", ids[32:], logits_from=7)]).logits[0].clone()
    assert near(found[0], prefill(fresh, "b", ids))


def test_a_piece_of_a_prompt_wants_no_logits(kind: str) -> None:
    assert small(kind).extend([SessionTokens("s", [1, 2, 3], logits_from=3)]).logits[0].shape == (0, VOCAB)


def test_features_are_what_the_head_sees(kind: str) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**GROUPED)).eval()
    done = engine_of(kind, model).extend([SessionTokens("s", [1, 2, 3], hidden_from=0)])
    with torch.no_grad():
        assert near(model.lm_head(done.hidden_states[0]), done.logits[0])


def test_states_of_layers_with_several_streams_are_not_given() -> None:
    """Of Gemma 3n. A step that wanted them failed; a drafter that reads them is refused instead."""
    model = tiny_model("gemma3n_text", {})
    assert StateHooks(model).shape == (0, 0)


LAYERS_READ = (1, 2)


def test_states_of_several_layers_are_those_of_transformers(modelled: tuple[PagedEngine, list[int], Any]) -> None:
    """In a step with others, along a tree too: what is captured stands behind the final state."""
    engine, ids, truth = modelled
    layers, width = LAYERS_READ, 64
    assert engine.state_shape == (3, width)
    prefill(engine, "a", ids[:20])
    batch = [
        SessionTokens("b", ids[:6], logits_from=6, hidden_from=2, layers=layers[:1]),
        SessionTokens("a", [ids[20], 5, ids[21]], (-1, 0, 0), logits_from=1, hidden_from=0, layers=layers),
        SessionTokens("c", ids[:6]),
    ]
    done = engine.extend(batch)
    assert done.layers == layers
    for part, positions in zip(done.hidden_states, ([2, 3, 4, 5], [20, None, 21], []), strict=True):
        assert part.shape == (len(positions), (1 + len(layers)) * width)
        for row, position in zip(part, positions, strict=True):
            if position is not None:
                for i, layer in enumerate(layers, 1):
                    assert near(row[i * width : (i + 1) * width], truth.hidden_states[layer][0, position])
    plain = engine.extend([SessionTokens("c", ids[6:8], hidden_from=0)])
    assert plain.hidden_states[0].shape == (2, width)


def test_features_of_rows_without_logits(kind: str) -> None:
    """A piece of a prompt may want the hidden states of its end, beside others that want logits."""
    engine, rows = small(kind), [1, 2, 3, 4, 5]
    whole = engine.extend([SessionTokens("all", rows, hidden_from=0)]).hidden_states[0].clone()
    batch = [
        SessionTokens("none", rows, logits_from=3),
        SessionTokens("piece", rows, logits_from=5, hidden_from=2),
        SessionTokens("end", rows, logits_from=4, hidden_from=1),
        SessionTokens("late", rows, logits_from=1, hidden_from=3),
    ]
    done = engine.extend(batch)
    assert [len(part) for part in done.logits] == [2, 0, 1, 4]
    assert [len(part) for part in done.hidden_states] == [0, 3, 4, 2]
    for part, rows_from in zip(done.hidden_states[1:], (2, 1, 3), strict=True):
        assert near(part, whole[rows_from:])


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_inputs_in_place_of_embeddings(kind: str) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**GROUPED)).eval()
    engine = engine_of(kind, model)
    told = engine.extend([SessionTokens("ids", [1, 2, 3])]).logits[0].clone()
    inputs = model.get_input_embeddings().weight.detach()[[1, 2, 3]]
    before = inputs.clone()
    given = engine.extend([SessionTokens("inputs", [0, 0, 0], input_embeddings=inputs)]).logits[0]
    assert near(given, told)
    assert torch.equal(inputs, before), "what was given is not written to"


def test_a_layer_that_goes_past_the_attention_interface_is_refused() -> None:
    """It could not be rolled back."""
    model = LlamaForCausalLM(LlamaConfig(**GROUPED)).eval()
    engine = TransformersEngine(model, ModelInfo("m", "f"), kv_tokens=64)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelMismatch, match="2 of 3 layers"):
        engine.extend([SessionTokens("s", [1, 2, 3])])


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    def info(name: str, **options: str) -> ModelInfo:
        return load_model(str(tmp_path / name), EngineOptions(device="cpu", **options)).engine.info  # type: ignore[arg-type]

    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        make_model(tmp_path / name, seed=seed)
    one, other = info("one"), info("other")
    half, bytes_ = info("one", dtype="bfloat16"), info("one", quantization="int8")
    torchs = info("one", engine="transformers")
    assert one.fingerprint == info("same").fingerprint
    assert torchs.fingerprint == info("same", engine="transformers").fingerprint
    told = {each.fingerprint for each in (one, other, half, bytes_, torchs)}
    assert len(told) == 5, "other weights, other numbers, another arithmetic"
    assert one.vocabulary_digest == other.vocabulary_digest
    assert (one.name, one.dtype, one.context_length) == ("one", "float32", 2048)
    assert (half.dtype, bytes_.dtype) == ("bfloat16", "int8")


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("/nowhere/at/all", {}, "target"),
        ("{tmp}", {}, "target"),
        ("{model}", {"dtype": "float8"}, "dtype"),
        ("{model}", {"device": "abacus"}, "device"),
        ("{model}", {"quantization": "int8", "engine": "transformers"}, "quantization"),
        ("{model}", {"dtype": "float16", "engine": "native"}, "engine"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, name: str, options: dict[str, str], field: str) -> None:
    model = make_model(tmp_path / "model", seed=1)
    (tmp_path / "empty").mkdir()
    chosen: dict[str, Any] = {"device": "cpu"} | options
    with pytest.raises(StartupError) as caught:
        load_model(name.format(tmp=tmp_path / "empty", model=model), EngineOptions(**chosen))
    assert caught.value.field == field


def test_a_plan_that_differs_from_its_model_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a family changes in a release of transformers: slower, never wrong."""

    def mistaken(model: Any) -> Any:
        return dataclasses.replace(build_spec(model), activation="gelu")

    folder = str(make_model(tmp_path / "model", seed=1))
    monkeypatch.setattr("outrider.engine.loading.selection.build_spec", mistaken)
    said: list[str] = []
    assert isinstance(load_model(folder, progress=said.append).engine, TransformersEngine)
    assert any("away from the model itself" in line for line in said)


def test_a_rotation_that_looks_at_the_longest_position_has_no_plan() -> None:
    """As in Phi-3 with a long context: a session would feel how long its neighbours are."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        **GROUPED, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=long
    )
    with pytest.raises(UnsupportedModel, match="length of the context"):
        build_spec(Phi3ForCausalLM(config))


def test_an_unknown_family_has_no_plan() -> None:
    config = OPTConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32)
    with pytest.raises(UnsupportedModel, match="opt"):
        build_spec(OPTForCausalLM(config))
