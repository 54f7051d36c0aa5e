"""Every architecture of the installed transformers that writes text, as a toy model, and whether it can be a target.

`python -m tests.architectures` writes docs/targets.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from outrider.engine import Engine, SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.models.pretrained import auto_class
from outrider.protocol.errors import OutriderError
from outrider.testing.toy_models import byte_tokenizer

PAGE = Path(__file__).parent.parent / "docs" / "targets.md"
CAUSAL: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FAMILIES: dict[str, str] = CAUSAL | {
    name: kind for name, kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items() if name not in CAUSAL
}
TOLERANCE = 1e-5
_LOOSER = {"gemma4": 3e-5}  # by how a name begins: scores that are not scaled down round more
CONTEXT = 96
ORIGINAL = 32  # where a rotation changes
TOKENS = 56  # of the text: past windows, chunks, and where a rotation changes
LAYERS = 4
KV_TOKENS = 512

# What a configuration calls a size, and how large it is here. Windows, chunks and the like are small: texts pass them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "ffn_embed_dim"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_inner", "dim_ff", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "v_head_dim", "kv_channels", "global_head_dim", "d_kv"), 16),
    **dict.fromkeys(("swa_head_dim", "swa_v_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "index_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), CONTEXT),
    **dict.fromkeys(("sliding_window", "attention_window", "window_size", "local_attention", "keep_window_size"), 6),
    **dict.fromkeys(("attention_chunk_size", "floor_scale", "sliding_window_size", "index_topk"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "conv_kernel_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "lru_width"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "mamba_d_ssm": 128,
    "lru_width": 64,
    "mlp_hidden_size": 96,
    "encoder_hash_byte_group_vocab": 64,
    "vocab_size_per_layer_input": 257,
    "num_kv_shared_layers": 0,
    "attention_hidden_size": 64,
    "rescale_every": 0,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "dropout": 0.0,
}
# Of the part that sees images, which no text reaches.
EYES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    "out_hidden_size": 64,
}
NAMES: dict[str, Any] = {"vocab_size": 257, "eos_token_id": 256, "bos_token_id": 1, "pad_token_id": 0}

# What more a family needs to be built so small, or to be built with what it is known for.
_HEADS = {"head_dim": 16}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_SECTIONS = {"rope_parameters": _MROPE}
_CONV = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_MAMBA = {"layer_types": ["mamba", "attention", "mamba", "attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "glm4v_text": {"rope_parameters": _MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": _HEADS,
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_vl_text": _SECTIONS,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": ORIGINAL,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

# More than one kind of a family: by name, the family and what is other than usual.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    "phimoe, longrope": (
        "phimoe",
        {
            "rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "llama, Llama 3's scaling": ("llama", {"rope_parameters": LLAMA3}),
    "llama, dynamic scaling": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    "qwen2, sliding window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "llama4_text, without temperature": ("llama4_text", {"attn_temperature_tuning": False}),
}


_REFUSAL = "is not a model that Outrider can run: "
_LOADING = "/tiny': "


@dataclass(frozen=True, slots=True)
class Fate:
    """Result for an architecture: the engines that serve it, or the reason why none does."""

    name: str
    model: str
    engines: tuple[str, ...] = ()
    refusal: str = ""
    context: int = 0
    not_built: str = ""
    wrong: str = ""

    @property
    def reason(self) -> str:
        """Return the reason for a rejection, without folder names."""
        return re.sub(r"/\S+/tiny\b", "tiny", self.refusal.split(_REFUSAL, 1)[-1].split(_LOADING, 1)[-1])


def tiny_config(family: str, changes: dict[str, Any]) -> PreTrainedConfig:
    return _shrunk(CONFIG_MAPPING[family], SPECIAL.get(family, {}) | changes)


def _shrunk(kind: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    usual = kind()
    known = usual.to_dict()
    chosen: dict[str, Any] = {name: size for name, size in SIZES.items() if isinstance(known.get(name), int)}
    if "vision" in kind.model_type:
        chosen |= {name: size for name, size in EYES.items() if isinstance(known.get(name), int)}
    chosen |= {name: token for name, token in NAMES.items() if name in known}
    if "qk_rope_head_dim" in known and "head_dim" in chosen:
        chosen["head_dim"] = chosen["qk_rope_head_dim"]  # what is rotated
    if "kv_lora_rank" in known:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]  # all heads share what is cached
    if "is_decoder" in known:
        chosen["is_decoder"] = True
    for name in kind.sub_configs:
        if isinstance(part := getattr(usual, name, None), PreTrainedConfig):
            chosen[name] = _shrunk(type(part), SPECIAL.get(part.model_type, {}))
    types = known.get("layer_types")
    if types:
        chosen["layer_types"] = _few(types)
    return kind(**chosen | changes)


def _few(types: list[str]) -> list[str]:
    """Return one type per layer, with every kind present."""
    kinds = list(dict.fromkeys(types))
    if len(set(types[:LAYERS])) == len(kinds):
        return types[:LAYERS]
    return (types[: max(1, LAYERS - len(kinds) + 1)] + kinds[1:])[:LAYERS]


def tiny_model(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(family, changes)
    model: PreTrainedModel = auto_class(config).from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms begin as zeros and ones, which would hide a mistake
            weight.add_(torch.randn_like(weight) * 0.05)
    return model


def save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def fate(name: str, scratch: Path) -> Fate:
    """Build a model, load it with every engine that supports it, and compare with its eager forward."""
    family, changes = VARIANTS.get(name, (name, {}))
    model_name = FAMILIES[family]
    try:
        model = tiny_model(family, changes)
        model(torch.arange(2, 10)[None])  # else it is no model to compare with
        save(model, scratch)
    except Exception as error:
        return Fate(name, model_name, not_built=f"{type(error).__name__}: {error}")
    engines: dict[str, Engine] = {}
    refusal = ""
    for chosen in ("auto", "transformers"):
        options = EngineOptions(device="cpu", engine=chosen, kv_tokens=KV_TOKENS, threads=1)
        try:
            engine = load_model(str(scratch), options).engine
        except OutriderError as error:
            refusal = error.message
            break
        engines[type(engine).__name__.removesuffix("Engine").lower()] = engine
    for kind, engine in engines.items():
        looser = [value for start, value in _LOOSER.items() if name.startswith(start)]
        wrong = difference(engine, scratch, max(looser, default=TOLERANCE))
        if wrong:
            return Fate(name, model_name, wrong=f"{kind}: {wrong}")
    context = min((engine.info.context_length for engine in engines.values()), default=0)
    return Fate(name, model_name, tuple(engines), refusal, context)


def difference(engine: Engine, folder: Path, tolerance: float = TOLERANCE) -> str:
    """Describe how an engine differs from the model; empty if it does not."""
    kind = auto_class(AutoConfig.from_pretrained(folder))
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(2, 250, (min(TOKENS, engine.info.context_length),), generator=torch.Generator().manual_seed(5))
    text, other = ids.tolist(), ids.flip(0)[:20].tolist()

    def true(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    whole, beside, end = true(text), true(other), len(text)
    found: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def ask(way: str, *asked: tuple[SessionTokens, torch.Tensor]) -> None:
        answers = engine.extend([rows for rows, _ in asked]).logits
        found.extend((way, got.clone(), wanted) for got, (_, wanted) in zip(answers, asked, strict=True))

    ask("one pass", (SessionTokens("one", text), whole))
    for start in range(0, end, 7):
        ask("pieces", (SessionTokens("pieces", text[start : start + 7]), whole[start : start + 7]))
    ask("two sessions", (SessionTokens("a", text[:9]), whole[:9]), (SessionTokens("b", other[:13]), beside[:13]))
    for at in range(9, end - 12):
        pieces = [(SessionTokens("a", text[at : at + 1]), whole[at : at + 1])]
        if 13 + at - 9 < len(other):
            pieces.insert(0, (SessionTokens("b", other[at + 4 : at + 5]), beside[at + 4 : at + 5]))
        ask("steps", *pieces)
    tree = end - 12
    wrong = [(text[tree] + 1) % 250, (text[tree + 1] + 1) % 250]
    # A wrong branch of two, the right one with a wrong leaf beside the right one.
    guesses = [wrong[0], wrong[1], text[tree], wrong[1], text[tree + 1], text[tree + 2]]
    branch = torch.cat(
        [true([*text[:tree], *wrong])[tree:], true([*text[: tree + 1], wrong[1]])[tree:], whole[tree + 1 : tree + 3]]
    )
    ask("tree", (SessionTokens("a", guesses, (-1, 0, -1, 2, 2, 4)), branch))
    engine.compact("a", tree, [2, 4, 5])
    ask("after a tree", (SessionTokens("a", text[tree + 3 :]), whole[tree + 3 :]))
    for way, got, wanted in found:
        distance = float((got - wanted).norm() / wanted.norm())
        if not distance <= tolerance:
            return f"{way}: {distance:.2g}"
    return ""


def fates(names: Sequence[str]) -> Iterator[Fate]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers thinks of tiny configurations
        logging.set_verbosity_error()
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                yield fate(name, Path(folder) / "tiny")


_HEAD = """# What can be a target

Every architecture of transformers {version} that continues texts, also those that see images, built as a toy
model with random weights and loaded as a target. Its logits are compared with its own eager forward pass: in one
pass, in pieces, token by token, as a tree and beside another session, on texts past its windows, its chunks and
the length at which its rotation changes. `python -m tests.architectures` writes this page; `make prove` fails when
it is out of date. Images, sound and video cannot be sent.

The table covers architectures. Each model is also checked against its own forward pass whenever it is loaded:
[the engine](engine.md#checked-against-the-model-itself).

`native` means the kernels on a CPU. On CUDA it means `cuda`, which runs the same model spec.
"""


def page(found: Sequence[Fate]) -> str:
    """Return the text of docs/targets.md."""
    served = [each for each in found if each.engines and not each.refusal]
    refused = [each for each in found if each.refusal]
    unbuilt = [each for each in found if each.not_built]
    lines = [
        _HEAD.format(version=transformers.__version__),
        f"## Served ({len(served)})",
        "",
        "| type | engines |",
        "|---|---|",
    ]
    lines += [f"| {each.name} | {', '.join(each.engines)}{_limited(each)} |" for each in served]
    lines += ["", f"## Refused ({len(refused)})", "", "| type | why |", "|---|---|"]
    lines += [f"| {each.name} | {_cell(each.reason)} |" for each in refused]
    lines += [
        "",
        f"## Not tried ({len(unbuilt)})",
        "",
        "No toy model could be built here. A real model is checked against itself at start like any other.",
        "",
    ]
    lines += [*textwrap.wrap(", ".join(each.name for each in unbuilt) + ".", 140), ""]
    return "\n".join(lines)


def _limited(found: Fate) -> str:
    return ", up to the length at which its rotation changes" if found.context == ORIGINAL else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    found = []
    for each in fates(names or [*FAMILIES, *VARIANTS]):
        print(each, flush=True)
        found.append(each)
    if not names:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
