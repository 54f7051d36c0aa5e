"""A GGUF file is indexed with its sizes and ends; what changes in it is noticed, what it lacks is refused."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from outrider.engine.loading.loader import load_model
from outrider.models import GGUF, INDEX
from outrider.models.hub import locate, locate_safetensors
from outrider.models.tokenizer import load_tokenizer
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import SamplingDefaults
from tests import gguf_files
from tests.gguf_files import Shape, q4_k_m, write_gguf
from tests.unit.outrider.models.gguf_models import SMALL, TOKENS, options, scaled_file, weights_of_transformers, without

pytestmark = pytest.mark.usefixtures("own_home")


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


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_an_id_of_minus_one_names_no_token(
    engine: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such files were refused, and without their padding the last token would be left out of texts as a special one."""
    for kind, key in (("bos", "bos"), ("pad", "padding")):
        add = partial(gguf.GGUFWriter.add_int32, key=f"tokenizer.ggml.{key}_token_id", val=-1)
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{kind}_token_id", lambda writer, _, add=add: add(writer))
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_eos_token_id", lambda writer, at: writer.add_uint32("tokenizer.ggml.eos_token_id", at - 1)
    )
    path = write_gguf(tmp_path / "none.gguf", SMALL, lambda _: "Q8_0", architecture)
    loaded = load_model(str(path), options(engine=engine))
    assert gguf_files.EOS not in (loaded.tokenizer.pad_token, loaded.tokenizer.bos_token)  # the last of the file
    assert loaded.engine.info.eos_token_ids == (SMALL.vocab - 2, SMALL.vocab - 1)  # the last ends a turn by its name


@pytest.mark.parametrize("part", [0.0, 0.2, 0.9], ids=["empty", "header", "most"])
def test_a_broken_file_is_told_in_a_sentence(part: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "whole.gguf", SMALL, lambda _: "Q8_0")
    content = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[: int(part * len(content))] if part else b"<html>not found</html>")
    for _ in range(2):
        with pytest.raises(StartupError, match=r"broken\.gguf cannot be read as a GGUF file"):
            load_model(str(broken), options())
