"""A GGUF file is read in place, with the weights that transformers finds in it; what changes in it is noticed."""

from __future__ import annotations

import gc
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.native import NativeEngine, dequantize
from outrider.engine.transformers.engine import TransformersEngine
from outrider.models import GGUF, INDEX, in_place
from outrider.models.gguf import convert_gguf
from outrider.models.hub import locate, locate_safetensors
from outrider.models.in_place import load_in_place, replace_while_running
from outrider.models.tokenizer import load_tokenizer, save_tokenizer
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import SamplingDefaults
from outrider.protocol.vocabulary import Vocabulary
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_embeddings_and_head
from tests import gguf_files
from tests.gguf_files import Shape, q4_k_m, write_gguf

FORMATS = {
    "Q4_K_M": q4_k_m,
    "Q4_0": lambda name: "Q4_0",
    "Q4_1 with a head of Q8_0": lambda name: "Q8_0" if name == "token_embd.weight" else "Q4_1",
    "Q5_K": lambda name: "Q5_K",
    "half of it F16": lambda name: "F16" if "attn" in name else "Q6_K",
}
TOKENS = list(range(3, 60))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Path(os.environ.get("OUTRIDER_HOME") or Path.home() / ".cache" / "outrider") / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


def options(**chosen: Any) -> EngineOptions:
    return EngineOptions(**({"device": "cpu", "dtype": "float32", "kv_tokens": 512, "threads": 1} | chosen))


def weights_of_transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", kind) for kind in FORMATS.values()]
    + [(other, q4_k_m) for other in ("qwen2", "qwen3", "gemma2", "gemma3")],
    ids=[*FORMATS.keys(), "qwen2", "qwen3", "gemma2", "gemma3"],
)
def test_weights_are_those_that_transformers_finds(architecture: str, kind: Any, tmp_path: Path) -> None:
    shape = Shape(tied=architecture != "llama", head_dim=128 if architecture == "qwen3" else 64)
    path = write_gguf(tmp_path / "random.gguf", shape, kind, architecture)
    wanted = weights_of_transformers(path)
    folder = locate(str(path), print)
    found = load_in_place(Path(folder), dequantize, AutoConfig.from_pretrained(folder))
    assert type(found) is type(wanted)
    wanted.set_attn_implementation(found.config._attn_implementation)  # its own choice ignores caps before 5.21
    state = wanted.state_dict()
    in_blocks = 0
    for name, weight in found.named_parameters():
        rows = getattr(weight, "quantized", None)
        in_blocks += rows is not None
        for values in [weight] if rows is None else [rows.dequantize(), dequantize(rows)]:
            assert torch.equal(values, state[name]), name
    assert in_blocks > 5
    tokenizers = [
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
    ]
    of_model = {token: number for token, number in tokenizers[1].get_vocab().items() if number < shape.vocab}
    assert {token: number for token, number in tokenizers[0].get_vocab().items() if number < shape.vocab} == of_model
    if not architecture.startswith("gemma"):  # these are of another kind, which the random file has not
        assert tokenizers[0].encode("the night") == tokenizers[1].encode("the night")
    with torch.inference_mode():
        ids = torch.tensor([TOKENS])
        assert torch.allclose(found(ids).logits, wanted(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kind", "smaller"),
    [("float32", "Q4_K_M", 3), ("bfloat16", "Q4_K_M", 1), ("bfloat16", "half of it F16", 1)],
)
def test_loading_writes_no_safetensors_and_gives_their_bits_and_names(
    dtype: str, kind: str, smaller: int, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), FORMATS[kind])
    blocks = load_model(str(path), options(dtype=dtype)).engine
    assert not list(tmp_path.rglob("*.safetensors"))
    folder = locate_safetensors(str(path), print)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    floats = load_model(str(folder), options(dtype=dtype)).engine
    assert isinstance(blocks, NativeEngine)
    assert isinstance(floats, NativeEngine)
    assert blocks.weight_bytes <= floats.weight_bytes / smaller
    assert Path(folder).name == Path(locate(str(path), print)).name == floats.info.name
    assert blocks.info == replace(floats.info, name="random"), "whatever the file's place and date"
    found, wanted = (each.extend([SessionTokens("s", TOKENS)]).logits[0] for each in (blocks, floats))
    assert torch.equal(found, wanted)


def test_the_file_is_unmapped_once_its_weights_are_packed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    loaded = load_model(str(path), options())
    gc.collect()
    assert isinstance(loaded.engine, NativeEngine)
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_engines_that_read_no_blocks_get_safetensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    small = load_model(str(path), options(quantization="int8")).engine
    assert isinstance(small, NativeEngine)
    assert not list(tmp_path.rglob("*.safetensors"))
    runs = load_model(str(path), options(engine="transformers")).engine
    assert isinstance(runs, TransformersEngine)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_a_model_that_the_kernels_refuse_is_loaded_again_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    said: list[str] = []
    monkeypatch.setattr("outrider.engine.model_spec._FAMILIES", {})
    assert isinstance(load_model(str(path), options(engine="auto"), said.append).engine, TransformersEngine)
    assert any("engine native not usable" in line for line in said)


def test_embeddings_and_head_are_read_without_the_rest(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(tied=False), q4_k_m)
    wanted = EmbeddingsAndHead.of(weights_of_transformers(path))
    found = read_embeddings_and_head(str(path), print)
    assert torch.equal(found.embeddings, wanted.embeddings)
    assert torch.equal(found.head, wanted.head)
    assert found.digest == wanted.digest
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_file_that_is_overwritten_in_place_is_noticed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    other = write_gguf(tmp_path / "other.gguf", Shape(), q4_k_m, seed=2)
    assert other.stat().st_size == path.stat().st_size
    folder = Path(locate(str(path), print))
    before = load_model(str(folder), options()).engine.info.fingerprint
    times = path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for name in (path, folder):  # the same size and time of the last change: it is the same folder
        said: list[str] = []
        assert locate(str(name), said.append) == folder
        assert len(said) == (name == path), said
    assert load_model(str(folder), options()).engine.info.fingerprint != before


def test_a_file_that_was_only_touched_is_not_indexed_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    folder = Path(locate(str(path), print))
    first = (folder / INDEX).read_bytes()
    path.chmod(0o600)
    said: list[str] = []
    assert locate(str(folder), said.append) == folder
    assert said == []
    assert (folder / INDEX).read_bytes() != first  # the new state: its digest need not be computed again


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and tokens take seconds, and transformers would read them for each part that it makes of the file."""
    read: list[gguf.GGUFReader] = []
    reader, build = gguf.GGUFReader, gguf.GGUFReader._build_fields

    def counted(self: gguf.GGUFReader, offs: int, count: int) -> int:
        read.append(self)
        return build(self, offs, count)

    monkeypatch.setattr(reader, "_build_fields", counted)
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    folder = Path(locate(str(path), print))
    assert len(read) == 1
    assert gguf.GGUFReader is reader
    assert weights_of_transformers(folder / GGUF).config.num_hidden_layers == Shape().layers
    assert len(read) > 1


def test_an_architecture_that_is_not_known_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "ARCHITECTURES", set())
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    loaded = load_model(str(path), options()).engine
    assert isinstance(loaded, NativeEngine)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


# --- scaled positions ------------------------------------------------------------------------------------------------

SMALL = Shape(hidden=256, inner=256, layers=1, heads=4, kv_heads=2, head_dim=64)
UNSCALED = 10_000.0 ** -(torch.arange(0, 64, 2) / 64)
FACTORS = [1.0] * 12 + [1.0 + 7.0 * step / 9 for step in range(1, 9)] + [8.0] * 12
FREQUENCIES = {"rope_freqs.weight": FACTORS}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}


def scaled_file(tmp_path: Path, architecture: str = "llama", **more: Any) -> Path:
    shape = (
        replace(SMALL, layers=6) if architecture == "gemma3" else SMALL
    )  # the first with full attention is the sixth
    return write_gguf(tmp_path / "random.gguf", shape, lambda _: "Q8_0", architecture, **more)


def rotary_of(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).model.rotary_emb


def scaled_model(path: Path) -> Any:
    """The model of transformers, which reads no scaling, with the frequencies that the file asks for."""
    model = weights_of_transformers(path)
    assert torch.allclose(model.model.rotary_emb.inv_freq, UNSCALED)
    model.model.rotary_emb.inv_freq /= torch.tensor(FACTORS)
    return model


@pytest.mark.parametrize("position", [10, 2046, 2047, 5000])
def test_a_factor_of_each_frequency_holds_at_short_and_long_positions(position: int, tmp_path: Path) -> None:
    rotary = rotary_of(locate(str(scaled_file(tmp_path, vectors=FREQUENCIES)), print))
    wanted = UNSCALED / torch.tensor(FACTORS)
    assert torch.allclose(rotary.inv_freq, wanted)
    cos, sin = rotary(torch.zeros(1), torch.tensor([[0, position]]))
    angles = (position * wanted).repeat(2)
    assert torch.allclose(cos[0, 1], angles.cos(), atol=2e-3)
    assert torch.allclose(sin[0, 1], angles.sin(), atol=2e-3)
    assert torch.allclose(rotary.inv_freq, wanted)


def test_models_read_in_place_and_converted_ones_rotate_by_the_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = scaled_file(tmp_path, vectors=FREQUENCIES)
    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        wanted, unscaled = scaled_model(path)(ids).logits, weights_of_transformers(path)(ids).logits
        folder = locate(str(path), print)
        found = load_in_place(Path(folder), dequantize, AutoConfig.from_pretrained(folder))
        assert found is not None
        assert torch.allclose(found(ids).logits, wanted, atol=1e-5)
        assert not torch.allclose(unscaled, wanted, atol=1e-2)
    engine = load_model(str(path), options()).engine
    assert isinstance(engine, NativeEngine)
    assert torch.allclose(engine.extend([SessionTokens("s", TOKENS)]).logits[0], wanted[0], atol=1e-4)
    assert not list(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(in_place, "ARCHITECTURES", set())
    engine = load_model(str(path), options()).engine
    assert torch.allclose(engine.extend([SessionTokens("s", TOKENS)]).logits[0], wanted[0], atol=1e-4)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_linear_scaling_divides_positions(tmp_path: Path) -> None:
    rotary = rotary_of(locate(str(scaled_file(tmp_path, fields=LINEAR)), print))
    assert torch.allclose(rotary.inv_freq, UNSCALED / 8)
    scaled = rotary(torch.zeros(1), torch.tensor([[80, 1600]]))
    plain = rotary_of(locate(str(write_gguf(tmp_path / "plain.gguf", SMALL, lambda _: "Q8_0")), print))
    for each, other in zip(scaled, plain(torch.zeros(1), torch.tensor([[10, 200]])), strict=True):
        assert torch.allclose(each, other, atol=1e-4)


def test_only_full_attention_of_gemma3_is_scaled(tmp_path: Path) -> None:
    folder = locate(str(scaled_file(tmp_path, "gemma3", fields=LINEAR)), print)
    parameters = AutoConfig.from_pretrained(folder).rope_parameters
    assert (parameters["full_attention"]["rope_type"], parameters["full_attention"]["factor"]) == ("linear", 8.0)
    assert parameters["sliding_attention"]["rope_type"] == "default"
    rotary = rotary_of(folder)
    assert torch.allclose(rotary.full_attention_inv_freq, UNSCALED / 8)
    assert torch.allclose(rotary.sliding_attention_inv_freq, UNSCALED)


@pytest.mark.parametrize("more", [{}, {"rope.scaling.finetuned": True}], ids=["", "finetuned"])
def test_yarn_is_read_with_its_original_context(more: dict[str, Any], tmp_path: Path) -> None:
    folder = locate(str(scaled_file(tmp_path, "qwen2", fields=YARN | more)), print)
    parameters = AutoConfig.from_pretrained(folder).rope_parameters
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10_000.0}
    assert parameters == wanted
    rotary = rotary_of(folder)
    assert rotary.attention_scaling == pytest.approx(1 + 0.1 * math.log(4))
    assert rotary.inv_freq[0] == pytest.approx(1.0)
    assert rotary.inv_freq[-1] == pytest.approx(UNSCALED[-1].item() / 4)


@pytest.mark.parametrize(
    ("fields", "vectors", "named"),
    [
        ({"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, {}, "type=dynamic"),
        ({"rope.scaling.type": "longrope"}, {"rope_factors_long.weight": FACTORS}, "rope_factors_long.weight"),
        ({}, {"rope_factors_long.weight": FACTORS}, "rope_factors_long.weight"),
        (LINEAR, FREQUENCIES, "rope_freqs.weight"),
        (YARN | {"rope.scaling.yarn_beta_fast": 16.0}, {}, "yarn_beta_fast=16"),
        ({"rope.scale_linear": 4.0}, {}, "scale_linear=4"),
        ({"rope.scaling.type": "linear"}, {}, "type=linear"),
    ],
    ids=["kind", "longrope", "tensor", "both", "part", "old", "incomplete"],
)
def test_scaling_that_is_not_known_is_refused_by_name(fields: Any, vectors: Any, named: str, tmp_path: Path) -> None:
    path = scaled_file(tmp_path, fields=fields, vectors=vectors)
    for _ in range(2):  # nothing that was half made is taken for an indexed file
        with pytest.raises(StartupError) as refused:
            locate(str(path), print)
        assert named in refused.value.message


@pytest.mark.parametrize("fields", [{}, {"rope.scaling.type": "none"}], ids=["silent", "none"])
def test_without_scaling_nothing_changes(fields: Any, tmp_path: Path) -> None:
    folder = locate(str(scaled_file(tmp_path, fields=fields)), print)
    parameters = AutoConfig.from_pretrained(folder).rope_parameters
    assert parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert torch.allclose(rotary_of(folder).inv_freq, UNSCALED)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_converted_models_keep_the_scaling(architecture: str, tmp_path: Path) -> None:
    folder = Path(locate(str(scaled_file(tmp_path, architecture, fields=LINEAR)), print))
    convert_gguf(folder, tmp_path / "converted")
    found, wanted = (AutoConfig.from_pretrained(each).rope_parameters for each in (tmp_path / "converted", folder))
    assert found == wanted
    assert "linear" in str(found)


def test_a_factor_without_a_kind_is_linear(tmp_path: Path) -> None:
    folder = locate(str(scaled_file(tmp_path, fields={"rope.scaling.factor": 2.0})), print)
    assert torch.allclose(rotary_of(folder).inv_freq, UNSCALED / 2)


def written(model_type: str, path: Path, stated: dict[str, Any], vectors: Any = None, **chosen: Any) -> Any:
    """A model of transformers with random weights, and the GGUF file of it."""
    sizes = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 287)
    config = AutoConfig.for_model(model_type, **sizes, **heads, **ends, **{"tie_word_embeddings": False} | chosen)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    named = {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 16}
    gguf_files.write_model(path, model, model_type.replace("_moe", "moe"), named | stated, vectors or {})
    return model


ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}


def rotated_in_part(share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}}


CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
STATED_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 40}


@pytest.mark.parametrize(
    ("model_type", "stated", "chosen"),
    [
        ("starcoder2", {"rope.freq_base": 1e6}, ROTATED | {"norm_epsilon": 1e-5}),
        ("stablelm", {"rope.freq_base": 1e6, "rope.dimension_count": 4}, ROTATED | {"layer_norm_eps": 1e-5}),
        ("phi3", {"attention.sliding_window": 20}, {"sliding_window": 20, "rms_norm_eps": 1e-5}),
        ("phi3", {"attention.sliding_window": 0}, {"rms_norm_eps": 1e-5}),
        ("phi3", {}, {"rms_norm_eps": 1e-5}),
        ("stablelm", {"rope.dimension_count": 8}, rotated_in_part(0.5) | {"layer_norm_eps": 1e-5}),
        ("phi3", {"rope.dimension_count": 12}, rotated_in_part(0.75) | {"rms_norm_eps": 1e-5}),
        (
            "nemotron",
            {"rope.dimension_count": 8, "attention.key_length": 32, "attention.layer_norm_epsilon": 1e-2},
            rotated_in_part(0.25) | {"norm_eps": 1e-2, "head_dim": 32},
        ),
        (
            "gemma2",
            {"attention.sliding_window": 20} | CAPS,
            {"sliding_window": 20, "head_dim": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": True} | CAPS,
        ),
        ("qwen3", {"attention.key_length": 32, "rope.dimension_count": 32}, {"head_dim": 32, "rms_norm_eps": 1e-5}),
        ("gpt2", {"context_length": 2048}, {}),
        ("qwen3_moe", STATED_EXPERTS, EXPERTS | {"moe_intermediate_size": 40, "head_dim": 16, "norm_topk_prob": True}),
        (
            "qwen2_moe",
            STATED_EXPERTS | {"expert_shared_feed_forward_length": 56},
            EXPERTS | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56},
        ),
    ],
    ids=[
        *("starcoder2", "stablelm", "phi3", "phi3 as of Phi-4", "phi3 without a word of a window", "half of each head"),
        *("three quarters of it", "nemotron", "caps of gemma2", "qwen3", "gpt2", "qwen3_moe", "qwen2_moe"),
    ],
)
def test_positions_and_sizes_are_those_of_the_model(
    model_type: str, stated: dict[str, Any], chosen: dict[str, Any], tmp_path: Path
) -> None:
    """Transformers reads neither base, window nor share of these: StarCoder2-3B has 999,999, Phi-3-mini-4k 2,047."""
    model = written(model_type, tmp_path / "model.gguf", stated, **chosen)
    folder = locate_safetensors(str(tmp_path / "model.gguf"), print)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        ids = torch.tensor([TOKENS])
        assert torch.allclose(found(ids).logits, model(ids).logits, atol=1e-4)


def test_norms_that_transformers_would_leave_out_are_refused(tmp_path: Path) -> None:
    """StableLM 2 12B has them; no field of a file tells, and transformers skips tensors that it does not look for."""
    norms = {f"blk.{layer}.attn_q_norm.weight": [1.0] * 64 for layer in range(2)}
    written("stablelm", tmp_path / "model.gguf", {}, norms, layer_norm_eps=1e-5)
    with pytest.raises(StartupError, match=r"blk\.0\.attn_q_norm"):
        locate(str(tmp_path / "model.gguf"), print)


# --- tokenizers ------------------------------------------------------------------------------------------------------

TURNS = ("<｜User｜>", "<｜Assistant｜>")


def tokenizers_of(path: Path, tmp_path: Path) -> list[Any]:
    """The verifier's tokenizer, and the coordinator's, which is made from files that the verifier sends."""
    own = AutoTokenizer.from_pretrained(locate(str(path), print))
    save_tokenizer(own, tmp_path / "sent")
    return [own, load_tokenizer(tmp_path / "sent")]


@pytest.mark.parametrize(
    ("architecture", "pre"), [("llama", "llama-bpe"), ("qwen2", "deepseek-r1-qwen"), ("qwen3", "qwen2")]
)
def test_added_tokens_are_found_whatever_their_letters(architecture: str, pre: str, tmp_path: Path) -> None:
    """Transformers takes DeepSeek's for spelled by bytes: turns of a chat were cut, BOS had an id past the model's."""
    shape = replace(SMALL, head_dim=128 if architecture == "qwen3" else 64)
    path = write_gguf(tmp_path / "turns.gguf", shape, lambda _: "Q8_0", architecture, pre=pre, added=TURNS)
    first = shape.vocab - 3
    for tokenizer in tokenizers_of(path, tmp_path):
        ids = tokenizer.encode("<｜User｜>a<｜Assistant｜>", add_special_tokens=False)
        assert ids == [first, tokenizer.convert_tokens_to_ids("a"), first + 1]
        assert tokenizer.decode(ids) == "<｜User｜>a<｜Assistant｜>"
        assert len(tokenizer) == shape.vocab
        assert max(tokenizer.encode("<|endoftext|></s>")) < shape.vocab, "of transformers' classes, not of the file"


def test_an_added_token_of_spaces_does_not_replace_the_one_that_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in GPT-NeoX's vocabulary, which StableLM 3B has. Spelled by bytes, both are ĠĠ, and one had no place."""
    add_types, add_merges = gguf.GGUFWriter.add_token_types, gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", lambda it, types: add_types(it, [*types[:-3], 1, 4, 3]))
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda it, merges: add_merges(it, [*merges, "Ġ Ġ"]))
    shape = replace(SMALL, vocab=288)
    path = write_gguf(tmp_path / "spaces.gguf", shape, lambda _: "Q8_0", pre="gpt-2", added=("ĠĠ", "  "))
    for tokenizer in tokenizers_of(path, tmp_path):
        assert tokenizer.convert_ids_to_tokens([shape.vocab - 3, shape.vocab - 2]) == ["ĠĠ", "  "]
        ids = tokenizer.encode("a  b", add_special_tokens=False)
        assert ids[1:-1] == [shape.vocab - 2]
        assert tokenizer.decode(ids) == "a  b"


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "ĊĊ", "1", "2", ".", "Ġb"]),
        ("gpt-2", ["a", "Ċ", "Ċ", "12", ".", "Ġb"]),
        ("mpt", ["a", "Ċ", "Ċ", "12", ".", "Ġb"]),
        ("deepseek-coder", ["a", "Ċ", "Ċ", "1", "2", ".", "Ġb"]),
        ("seed-coder", ["a", "ĊĊ", "1", "2", ".", "Ġb"]),
        ("lfm2", ["a", "ĊĊ", "12", ".", "Ġb"]),
    ],
)
def test_digits_are_apart_where_the_merges_were_learned_so(
    architecture: str, pre: str, pieces: list[str], tmp_path: Path
) -> None:
    for tokenizer in tokenizers_of(scaled_file(tmp_path, architecture, pre=pre), tmp_path):
        found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12. b")
        assert [piece for piece, _ in found] == pieces


@pytest.mark.parametrize(("architecture", "rule"), [("llama", "gpt-2"), ("qwen2", "qwen2")])
def test_words_are_cut_by_the_usual_rule_where_a_file_names_none(
    architecture: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files of early 2024, of which some have no types of tokens either."""
    wanted = tokenizers_of(scaled_file(tmp_path, pre=rule), tmp_path)[0].backend_tokenizer.pre_tokenizer
    for left_out in ("add_tokenizer_pre", "add_token_types"):
        monkeypatch.setattr(gguf.GGUFWriter, left_out, lambda writer, _: None)
    for tokenizer in tokenizers_of(scaled_file(tmp_path, architecture), tmp_path):
        found, text = tokenizer.backend_tokenizer.pre_tokenizer, "It's 123\n\n x"
        assert found.pre_tokenize_str(text) == wanted.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("deepseek-coder", "x=y  +  3.14", ["x", "=", "y", "  +  ", "3", ".", "1", "4"]),
        ("deepseek-coder", "if (ab):\r\n\tc", ["if", " (", "ab", "):", "\r", "\n", "\tc"]),
        ("deepseek-coder", "say 여기가 ab中文字", ["say", " ", "여기가", " ab", "中文字"]),
        ("seed-coder", "f(x);\n\n12 é's", ["f", "(x", ");", "\n\n", "1", "2", " é", "'s"]),
    ],
)
def test_the_rules_of_coders_cut_one_after_the_other(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    for tokenizer in tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path):
        found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in found] == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm", "a.x-4.0", "qwen2"])
def test_words_are_cut_as_the_file_says_whatever_the_architecture(pre: str, tmp_path: Path) -> None:
    """Transformers cut those of all Qwens alike when it loaded them, of A.X 4.0 too."""
    wanted = tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path)[0].backend_tokenizer.pre_tokenizer
    path, text = tmp_path / "qwen.gguf", "It's 12345 o'CLOCK,\n\n  u\u0308ber/x"
    write_gguf(path, replace(SMALL, head_dim=128), lambda _: "Q8_0", "qwen3", pre=pre)
    for tokenizer in tokenizers_of(path, tmp_path):
        splits = tokenizer.backend_tokenizer.pre_tokenizer
        assert splits.pre_tokenize_str(text) == wanted.pre_tokenize_str(text)
        composed = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert ("\u0308" in composed) == (pre != "qwen2")
    if pre == "qwen2":
        assert Path(locate(str(scaled_file(tmp_path, "qwen2", pre=pre)), print)).is_dir()
    else:  # there transformers does so whatever the files say
        with pytest.raises(StartupError, match=rf"tokenizer\.ggml\.pre is {pre}, must be qwen2"):
            locate(str(scaled_file(tmp_path, "qwen2", pre=pre)), print)


def test_letters_are_composed_for_qwen3_5(tmp_path: Path) -> None:
    """As its own tokenizer does. Transformers reads the splits alone."""
    sizes = {"full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2}
    more: Any = {"ssm.time_step_rank": 2, "ssm.inner_size": 16, "rope.dimension_sections": [2, 1, 1, 0]}
    for tokenizer in tokenizers_of(scaled_file(tmp_path, "qwen35", pre="qwen35", fields=sizes | more), tmp_path):
        assert tokenizer.encode("u\u0308ber") == tokenizer.encode("über")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "stablelm2"])
def test_texts_split_alike_where_transformers_knows_no_kinds(
    pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 5.17 does not, which splits each of them like GPT-2. Of the last one, no release knows anything."""
    text = "It's 12345 o'CLOCK,\r\n\n  über\u00a0x ½ ..."
    (known, _), read = tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path), AutoTokenizer.from_pretrained

    def unaware(*given: Any, **more: Any) -> Any:
        found = read(*given, **more)
        if "gguf_file" in more:
            found.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return found

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unaware)
    (tmp_path / "old").mkdir()
    for tokenizer in tokenizers_of(scaled_file(tmp_path / "old", pre=pre), tmp_path / "old"):
        splits = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert splits == known.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert ("123" in dict(splits)) == (pre == "llama-bpe")
        assert ("1" in dict(splits)) == (pre != "llama-bpe")


@pytest.mark.parametrize(("pre", "whole", "begins"), [("llama-bpe", 1, 1), ("falcon-h1", 1, 1), ("qwen2", 2, 0)])
def test_a_word_that_is_a_token_needs_no_merge_in_llama3(
    pre: str, whole: int, begins: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe, words = gguf.GGUFWriter.add_token_merges, list[str]()

    def without_last(writer: gguf.GGUFWriter, merges: list[str]) -> None:
        words.append(merges[-1].replace(" ", ""))
        describe(writer, merges[:-1])

    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", without_last)
    for tokenizer in tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path):
        assert len(tokenizer.encode(words[0], add_special_tokens=False)) == whole
        begun = tokenizer.encode("a")  # the file does not say whether a text begins with BOS
        assert begun[:-1] == [tokenizer.bos_token_id] * begins


@pytest.mark.parametrize(
    ("architecture", "stated", "ids"),
    [("llama", None, [4, 1]), ("llama", True, [4, 1]), ("llama", False, [2, 1]), ("gemma2", False, [2, 1])],
)
def test_a_space_is_put_first_unless_the_file_says_no(
    architecture: str, stated: bool | None, ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SentencePiece's tokenizers. Without that space none is taken from the beginning of an output either."""
    tokens = ["<unk>", "b", "a", "▁", "▁a", *(f"[PAD{number}]" for number in range(SMALL.vocab - 5))]

    def describe(writer: gguf.GGUFWriter, model: str) -> None:
        writer.add_string("tokenizer.ggml.model", "llama" if model == "gpt2" else model)
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        if stated is not None:
            writer.add_add_space_prefix(stated)

    add_tokens, add_types = gguf.GGUFWriter.add_token_list, gguf.GGUFWriter.add_token_types
    types = [2, 1, 1, 1, 1, *[5] * (SMALL.vocab - 5)]
    for kind in ("eos", "bos", "padding"):  # the first one of the padding is an end token all the same
        add = partial(gguf.GGUFWriter.add_uint32, key=f"tokenizer.ggml.{kind}_token_id", val=5)
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{kind[:3]}_token_id", lambda writer, _, add=add: add(writer))
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", describe)
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", lambda writer, _: add_tokens(writer, tokens))
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", lambda writer, _: add_types(writer, types))
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda writer, _: None)
    for tokenizer in tokenizers_of(scaled_file(tmp_path, architecture), tmp_path):
        assert tokenizer.encode("ab", add_special_tokens=False) == ids
        assert tokenizer.decode([4, 1]) == ("ab" if stated is not False else " ab")
        assert sorted(tokenizer.get_vocab().values()) == list(range(6)), "without padding, and <s> of transformers"
        assert tokenizer.eos_token_id == 5


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rows_of_the_head_without_a_token_are_no_part_of_the_vocabulary(architecture: str, tmp_path: Path) -> None:
    """The sizes of Qwen2.5 have different numbers of them, and its safetensors name none: one must draft for others."""
    found = []
    for padding in (0, 8):
        shape = replace(SMALL, vocab=SMALL.vocab + padding)
        path = write_gguf(tmp_path / f"{padding}.gguf", shape, lambda _: "Q8_0", architecture, padding=padding)
        assert AutoConfig.from_pretrained(locate(str(path), print)).vocab_size == shape.vocab
        found += [Vocabulary.of(tokenizer) for tokenizer in tokenizers_of(path, tmp_path)]
    assert len({vocabulary.digest for vocabulary in found}) == 1


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_tokens_are_added_to_a_text_where_the_file_says_so(
    pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, added: bool
) -> None:
    """Whatever is usual for its rule."""
    describe, end = gguf.GGUFWriter.add_eos_token_id, SMALL.vocab - 1

    def stated(writer: gguf.GGUFWriter, number: int) -> None:
        describe(writer, number)
        writer.add_add_bos_token(added)
        writer.add_add_eos_token(added)

    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", stated)
    for tokenizer in tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path):
        whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
        assert whole == ([end, *plain, end] if added else plain)


def with_template(path: Path, template: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    describe = gguf.GGUFWriter.add_eos_token_id

    def with_templates(writer: gguf.GGUFWriter, number: int) -> None:
        describe(writer, number)
        if template is not None:
            writer.add_chat_template(template)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_eos_token_id", with_templates)
        return write_gguf(path, SMALL, lambda _: "Q8_0")


def test_chat_templates_with_names_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hermes has one for tools."""
    wanted = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    named = [{"name": name, "template": text} for name, text in wanted.items()]
    path = with_template(tmp_path / "templates.gguf", named, monkeypatch)
    for tokenizer in tokenizers_of(path, tmp_path):
        assert tokenizer.chat_template == wanted
    assert load_tokenizer(Path(locate_safetensors(str(path), print))).chat_template == wanted
    for tokenizer in tokenizers_of(with_template(tmp_path / "tools.gguf", named[1:], monkeypatch), tmp_path):
        assert tokenizer.chat_template is None, "chats without tools would have none"


def test_a_chat_template_goes_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexed again in its folder, a file without a template had that of the file which it replaced."""
    path = with_template(tmp_path / "model.gguf", "{{ messages }}", monkeypatch)
    folder = locate(str(path), print)
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages }}"
    other, times = with_template(tmp_path / "other.gguf", None, monkeypatch), path.stat()
    content = other.read_bytes()
    path.write_bytes(content + b"\0" * (times.st_size - len(content)))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert locate(str(path), print) == folder
    assert AutoTokenizer.from_pretrained(folder).chat_template is None


def test_words_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.ggml\.pre is viking"):
        locate(str(scaled_file(tmp_path, pre="viking")), print)


@pytest.mark.parametrize("architecture", ["gemma4", "gpt-oss"])
def test_an_architecture_that_transformers_reads_in_part_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    """It was told by an error of transformers, about an attribute or an array."""
    with pytest.raises(StartupError, match=rf"general\.architecture is {architecture}, .*safetensors instead"):
        locate(str(write_gguf(tmp_path / "other.gguf", SMALL, lambda _: "Q8_0", architecture)), print)


def test_a_model_without_rotary_positions_is_indexed(tmp_path: Path) -> None:
    assert Path(locate(str(write_gguf(tmp_path / "gpt2.gguf", SMALL, lambda _: "Q8_0", "gpt2")), print)).is_dir()


def test_what_an_earlier_version_converted_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the tokenizer and the configuration that were read then."""
    path = str(scaled_file(tmp_path))
    monkeypatch.setattr("outrider.models.hub.INDEX_VERSION", 2)
    monkeypatch.setattr("outrider.models.gguf.INDEX_VERSION", 2)
    earlier = locate_safetensors(path, print)
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    assert locate_safetensors(path, print) not in (earlier, path)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1, "the earlier one is gone"


def without(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files lack the tensors with this in their names."""
    whole = gguf_files._tensors
    left = lambda shape, kind: ((name, size) for name, size in whole(shape, kind) if part not in name)  # noqa: E731
    monkeypatch.setattr(gguf_files, "_tensors", left)


@pytest.mark.parametrize("lacking", ["blk.0.ffn", "attn_norm"])
def test_a_file_without_some_weights_is_refused(lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one part of a split file: transformers would draw them at random, and another model at each start."""
    without(lacking, monkeypatch)
    path = write_gguf(tmp_path / "model-00001-of-00002.gguf", SMALL, lambda _: "Q8_0")
    with pytest.raises(StartupError, match=lacking):
        locate(str(path), print)


def test_a_file_with_weights_that_no_model_reads_is_refused(tmp_path: Path) -> None:
    """Transformers reads no biases of a Llama: its texts would be others, and no check would see it."""
    biases = {f"blk.{layer}.attn_q.bias": [3.0] * 256 for layer in range(2)}
    path = write_gguf(tmp_path / "biases.gguf", Shape(), lambda _: "Q8_0", vectors=biases)
    with pytest.raises(StartupError, match=r"blk\.0\.attn_q\.bias"):
        locate(str(path), print)


def test_what_transformers_reads_of_a_file_is_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of other architectures are found by it alone."""
    folder = Path(locate(str(write_gguf(tmp_path / "whole.gguf", SMALL, lambda _: "Q8_0")), print))
    without("ffn_down", monkeypatch)
    (folder / GGUF).unlink()
    write_gguf(folder / GGUF, SMALL, lambda _: "Q8_0")
    with pytest.raises(StartupError, match=r"without model\.layers\.0\.mlp\.down_proj"):
        convert_gguf(folder, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gemma_of_27b_divides_scores_by_its_own_number(architecture: str, layers: int, tmp_path: Path) -> None:
    """A file does not tell it; for all other sizes it is that of transformers."""
    for count, scalar in ((layers, 64), (2, 256)):
        shape = Shape(hidden=128, inner=32, heads=2, kv_heads=1, head_dim=32, layers=count)
        path = write_gguf(tmp_path / f"{count}.gguf", shape, lambda _: "F16", architecture)
        folder = Path(locate(str(path), print))
        assert AutoConfig.from_pretrained(folder).query_pre_attn_scalar == scalar


def test_turns_end_texts_and_sampling_is_as_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = gguf.GGUFWriter.add_eos_token_id

    def with_turns(writer: gguf.GGUFWriter, number: int) -> None:
        describe(writer, number)
        writer.add_eot_token_id(number - 1)
        writer.add_eom_token_id(number - 2)
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_penalty_repeat(1.05)

    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", with_turns)
    path, end = write_gguf(tmp_path / "turns.gguf", Shape(), lambda _: "Q4_K"), Shape().vocab - 1
    for engine in ("native", "transformers"):  # which reads what was converted
        loaded = load_model(str(path), options(engine=engine))
        assert loaded.engine.info.eos_token_ids == (end - 2, end - 1, end)
        assert loaded.engine.info.sampling == SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("architecture", "ends"),
    [
        ("llama", ["<|eot_id|>", "<|eom_id|>"]),
        ("llama", ["<|im_end|>"]),
        ("gemma2", ["<end_of_turn>"]),
        ("gemma3", ["<end_of_turn>"]),
        ("qwen2", ["<|im_end|>"]),
        ("qwen2", []),
    ],
)
@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
def test_a_turn_ends_a_text_even_if_the_file_does_not_name_its_end(
    architecture: str, ends: list[str], kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Llama 3.1 name no <|eom_id|>, many of Phi-3, Gemma 2 and Gemma 3 no end of a turn: chats went on.

    Files of Phi-3 and merged models have them as ordinary tokens, and answers showed them.
    """
    written = gguf.GGUFWriter.add_token_types

    def write_types(writer: gguf.GGUFWriter, types: list[int]) -> None:
        written(writer, [*types[: -1 - len(ends)], *[kind] * len(ends), types[-1]])

    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", write_types)
    monkeypatch.setattr(gguf_files, "EOS", "<|endoftext|>")
    path = write_gguf(tmp_path / "ends.gguf", SMALL, lambda _: "F16", architecture, pre="qwen2", added=ends)
    folder = locate(str(path), print)
    config = GenerationConfig.from_pretrained(folder)
    assert config.eos_token_id == list(range(SMALL.vocab - 1 - len(ends), SMALL.vocab))
    assert load_tokenizer(Path(folder)).decode(config.eos_token_id, skip_special_tokens=True) == ""


@pytest.mark.parametrize("part", [0.0, 0.2, 0.9], ids=["empty", "header", "most"])
def test_a_broken_file_is_told_in_a_sentence(part: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "whole.gguf", SMALL, lambda _: "Q8_0")
    content = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[: int(part * len(content))] if part else b"<html>not found</html>")
    for _ in range(2):
        with pytest.raises(StartupError, match=r"broken\.gguf cannot be read as a GGUF file"):
            load_model(str(broken), options())


def test_a_module_has_its_own_weights_again_after_it_ran() -> None:
    """Though they were replaced twice, as by blocks of a file and by a format's rounding, and though it failed."""
    linear = torch.nn.Linear(2, 2, bias=False)
    own = linear.weight
    replace_while_running(linear, lambda _: {"weight": torch.zeros(2, 2)})
    replace_while_running(linear, lambda _: {"weight": linear.weight.detach() + 1})
    assert linear(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
    assert linear.weight is own
    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.ones(1, 3))
    assert linear.weight is own
