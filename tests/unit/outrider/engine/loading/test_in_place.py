"""Weights in bfloat16 safetensors stay in their file until they are packed, and give the bits of float32 copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine import SessionTokens
from outrider.engine.loading import loader
from outrider.engine.loading.options import EngineOptions
from outrider.engine.native import NativeEngine, build
from outrider.models.in_place import load_in_place, rows_in_safetensors
from outrider.models.pretrained import empty_model
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.testing.toy_models import make_model
from tests.architectures import save, tiny_model
from tests.gguf_files import Shape, write_gguf

TOKENS = list(range(3, 60))


def in_bfloat16(folder: Path, family: str) -> Path:
    if family == "toy":
        make_model(folder, seed=1)
    else:
        save(tiny_model(family, {}), folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def run(folder: Path, **options: str) -> tuple[torch.Tensor, ModelInfo, int]:
    chosen = EngineOptions(device="cpu", kv_tokens=512, threads=1, **options)  # type: ignore[arg-type]
    engine = loader.load_model(str(folder), chosen).engine
    assert isinstance(engine, NativeEngine)
    return engine.extend([SessionTokens("s", TOKENS)]).logits[0].clone(), engine.info, engine.weight_bytes


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype)
        for family in ("toy", "gemma2", "gpt2", "gpt_neox", "phi3", "qwen3")
        for dtype in ("float32", "auto", "bfloat16")
        if (family, dtype) != ("gpt2", "bfloat16")  # runs through transformers
    ],
)
def test_bits_and_names_are_those_of_a_float32_copy(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_bfloat16(tmp_path, family)
    stayed: list[int] = []
    load_in_place = loader.load_in_place

    def load(*options: object) -> object:
        model = load_in_place(*options)  # type: ignore[arg-type]
        stayed.append(0 if model is None else sum(hasattr(weight, "quantized") for weight in model.parameters()))
        return model

    monkeypatch.setattr(loader, "load_in_place", load)
    found, info, size = run(folder, dtype=dtype)
    assert (stayed[0] > 5) == (family not in ("gpt2", "gpt_neox"))
    monkeypatch.setattr(loader, "load_in_place", lambda *_: None)
    wanted, same, copied = run(folder, dtype=dtype)
    assert torch.equal(found, wanted)
    assert (info, size) == (same, copied)


@pytest.mark.parametrize(
    ("stored", "options", "cache"),
    [
        ("float32", {}, "float32"),
        ("float32", {"kv_dtype": "bfloat16"}, "bfloat16"),
        ("float32", {"quantization": "int8"}, "bfloat16"),
        ("float32", {"dtype": "bfloat16"}, "bfloat16"),
        ("bfloat16", {}, "bfloat16" if build.library().outrider_tiles() else "float32"),
        ("bfloat16", {"dtype": "float32"}, "float32"),
        ("bfloat16", {"kv_dtype": "float32"}, "float32"),
        ("bfloat16", {"dtype": "float32", "quantization": "int8"}, "float32"),
        ("blocks", {}, "bfloat16"),
        ("blocks", {"dtype": "float32"}, "float32"),
    ],
)
def test_keys_and_values_have_the_precision_of_the_weights(
    stored: str, options: dict[str, str], cache: str, tmp_path: Path
) -> None:
    """Where the processor has no tiles, bfloat16 weights of a file are held in float32."""
    if stored == "blocks":
        folder = write_gguf(tmp_path / "random.gguf", Shape(), lambda _: "Q4_1")
    else:
        folder = in_bfloat16(tmp_path, "toy") if stored == "bfloat16" else make_model(tmp_path, seed=1)
    loaded = loader.load_model(str(folder), EngineOptions(device="cpu", kv_tokens=512, threads=1, **options))  # type: ignore[arg-type]
    assert isinstance(loaded.engine, NativeEngine)
    assert str(loaded.engine.cache_dtype) == f"torch.{cache}"


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    rows = rows_in_safetensors(folder, empty_model(AutoConfig.from_pretrained(folder)))
    return {name: each.dequantize() for name, each in rows.items()}


@pytest.mark.parametrize("shards", [1, 2])
def test_other_weights_beside_those_of_the_model_change_nothing(shards: int, tmp_path: Path) -> None:
    folder = in_bfloat16(tmp_path, "toy")
    state = load_file(folder / "model.safetensors")
    if shards == 2:
        (folder / "model.safetensors").unlink()
        names = sorted(state)
        places = {name: f"weights-{at % 2 + 1:05}-of-00002.safetensors" for at, name in enumerate(names)}
        for place in set(places.values()):
            save_file({name: state[name] for name in names if places[name] == place}, folder / place)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for name in ("adapter.safetensors", "model_ema.safetensors", "model-00001-of-00001.safetensors", "z.safetensors"):
        save_file({name: torch.zeros_like(weight) for name, weight in state.items()}, folder / name)
    found = stored_weights(folder)
    assert found.keys() == dict(empty_model(AutoConfig.from_pretrained(folder)).named_parameters()).keys()
    for name, weight in found.items():
        assert torch.equal(weight.flatten(), state[name].float().flatten()), name


def test_shards_of_an_earlier_save_are_not_read_beside_a_single_file(tmp_path: Path) -> None:
    folder = in_bfloat16(tmp_path, "toy")
    state = load_file(folder / "model.safetensors")
    old = {name: torch.zeros_like(weight) for name, weight in state.items()}
    save_file(old, folder / "model-00001-of-00001.safetensors")
    for name, weight in stored_weights(folder).items():
        assert torch.equal(weight.flatten(), state[name].float().flatten()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_without_some_weights_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Transformers would draw them: another model at each start, which every check finds right."""
    folder = in_bfloat16(tmp_path, "toy")
    weights = {name: each.to(dtype) for name, each in load_file(folder / "model.safetensors").items()}
    lacking = {name: each for name, each in weights.items() if "layers.1.mlp" not in name}
    assert len(lacking) < len(weights)
    save_file(lacking, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=r"without model\.layers\.1\.mlp\.down_proj\.weight"):
        run(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("beside", ["q_proj.bias", "q_proj.weight_scale"])
def test_a_model_with_weights_that_nothing_reads_is_refused(dtype: torch.dtype, beside: str, tmp_path: Path) -> None:
    """As of a quantised model whose configuration does not say so: its weights without their scales mean nothing."""
    folder = in_bfloat16(tmp_path, "toy")
    state = load_file(folder / "model.safetensors")
    state = {name: each.to(dtype) if "q_proj" in name else each for name, each in state.items()}
    state[f"model.layers.0.self_attn.{beside}"] = torch.ones(1)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=rf"with model\.layers\.0\.self_attn\.{beside}"):
        run(folder)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize(
    "unread",
    [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.weight.absmax",
        "model.layers.1.mlp.g_idx",
        "model.layers.1.self_attn.q_norm.weight",
        "model.embed_tokens.lora_embedding_A",
        "model.norm.weight.absmax",
    ],
)
def test_adapters_and_scales_of_any_name_are_refused(unread: str, dtype: str, tmp_path: Path) -> None:
    folder = in_bfloat16(tmp_path, "toy")
    state = load_file(folder / "model.safetensors") | {unread: torch.ones(4)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=rf"with {unread}"):
        run(folder, dtype=dtype)


UNUSED = (
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.bias",
    "model.layers.0.self_attn.masked_bias",
    "model.layers.0.self_attn.k_scale",
    "model.layers.0.self_attn.attn.v_scale",
    "model.layers.0.self_attn.kv_scale",
    "model.embeddings.position_ids",
    "model.layers.2.self_attn.q_proj.weight",  # a layer more than the model has, as for MTP
    "model.layers.2.eh_proj.weight",
    "model.mtp_layers.0.self_attn.q_proj.weight",
    "mtp.layers.0.mlp.up_proj.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
    "multi_modal_projector.linear_1.weight",
    "medusa_head.0.0.linear.weight",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["in place", "by transformers"])
def test_what_no_text_needs_is_left_out(dtype: torch.dtype, tmp_path: Path) -> None:
    """Buffers of earlier releases of transformers, scales of a KV cache, and layers and towers of other uses."""
    folder = in_bfloat16(tmp_path, "toy")
    state = {name: each.to(dtype) for name, each in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    wanted = run(folder, dtype="float32")[0]
    save_file(state | {name: torch.ones(4) for name in UNUSED}, folder / "model.safetensors", {"format": "pt"})
    assert bool(stored_weights(folder)) == (dtype == torch.bfloat16)
    assert torch.equal(run(folder, dtype="float32")[0], wanted)


def test_a_head_that_is_tied_by_name_only_is_read(tmp_path: Path) -> None:
    """Transformers does not tie a head that differs from the embeddings, whatever the configuration says."""
    folder = in_bfloat16(tmp_path, "toy")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    assert torch.allclose(run(folder, dtype="float32")[0], wanted, atol=1e-4)


def test_a_hub_ids_weights_stay_in_their_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = in_bfloat16(tmp_path / "snapshot", "toy")
    monkeypatch.setattr(
        "outrider.models.in_place.cached_file",
        lambda name, file, **_: str(snapshot / file) if name == "org/toy" else None,
    )
    config = AutoConfig.from_pretrained(snapshot)
    loaded = [load_in_place(each, loader.dequantize, config) for each in ("org/toy", snapshot)]
    for model in loaded:
        assert model is not None
        assert sum(hasattr(weight, "quantized") for weight in model.parameters()) > 5


def test_weights_that_are_not_all_there_are_left_to_the_hub(tmp_path: Path) -> None:
    """As while another process downloads them."""
    folder = in_bfloat16(tmp_path, "toy")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    config = AutoConfig.from_pretrained(folder)
    assert load_in_place(folder, loader.dequantize, config) is not None
    shards[-1].unlink()
    assert load_in_place(folder, loader.dequantize, config) is None


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_that_is_stored_too_is_read_in_place_if_it_is_equal(equal: bool, tmp_path: Path) -> None:
    folder = in_bfloat16(tmp_path, "toy")
    state = load_file(folder / "model.safetensors")
    embeddings = state["model.embed_tokens.weight"]
    state["lm_head.weight"] = embeddings.clone() if equal else embeddings.float()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=True)
    assert bool(rows_in_safetensors(folder, empty_model(config))) == equal
