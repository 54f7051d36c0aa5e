"""Synthetic checkpoints of drafters in exactly the layouts that are published, with seeded weights.

Names and shapes are written down here from the published formats, not taken from the product.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 257  # of the toy targets
HIDDEN, INNER, HEADS, KV_HEADS = 128, 192, 4, 2
HEAD_DIM = HIDDEN // HEADS
DRAFT_VOCAB = 96
MIN_POSITIONS = 64  # compared in every case

Weights = dict[str, torch.Tensor]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


class Random:
    """Seeded weights of a checkpoint."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.weights: Weights = {}

    def matrix(self, name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        self.weights[f"{name}.weight"] = self._normal(rows, columns) / columns**0.5
        if bias:
            self.weights[f"{name}.bias"] = 0.3 * self._normal(rows)

    def norm(self, name: str, width: int, centre: float = 1.0) -> None:
        self.weights[f"{name}.weight"] = centre + 0.2 * self._normal(width)

    def layer(self, name: str, *, inputs: int = HIDDEN, bias: bool = False, qk_norm: bool = False) -> None:
        """Add a decoder layer without its input norm."""
        self.attention(f"{name}.self_attn", inputs=inputs, bias=bias, qk_norm=qk_norm)
        self.mlp(f"{name}.mlp", INNER)
        self.norm(f"{name}.post_attention_layernorm", HIDDEN)

    def attention(
        self,
        name: str,
        *,
        inputs: int = HIDDEN,
        bias: bool = False,
        qk_norm: bool = False,
        gate: bool = False,
        centre: float = 1.0,
    ) -> None:
        self.matrix(f"{name}.q_proj", HEADS * HEAD_DIM * (1 + gate), inputs, bias=bias)
        self.matrix(f"{name}.k_proj", KV_HEADS * HEAD_DIM, inputs, bias=bias)
        self.matrix(f"{name}.v_proj", KV_HEADS * HEAD_DIM, inputs, bias=bias)
        self.matrix(f"{name}.o_proj", HIDDEN, HEADS * HEAD_DIM, bias=bias)
        if qk_norm:
            self.norm(f"{name}.q_norm", HEAD_DIM, centre)
            self.norm(f"{name}.k_norm", HEAD_DIM, centre)

    def mlp(self, name: str, inner: int) -> None:
        self.matrix(f"{name}.gate_proj", inner, HIDDEN)
        self.matrix(f"{name}.up_proj", inner, HIDDEN)
        self.matrix(f"{name}.down_proj", HIDDEN, inner)

    def vector(self, name: str, width: int) -> None:
        self.weights[name] = 0.2 * self._normal(width)

    def drafted_ids(self, draft_vocab: int) -> None:
        """Add offsets to ascending target ids."""
        ids = torch.randperm(VOCAB, generator=self._generator)[:draft_vocab].sort().values
        self.weights["d2t"] = ids - torch.arange(draft_vocab)
        self.weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)


def eagle3(
    folder: Path,
    *,
    seed: int = 1,
    layout: str = "original",
    layers: int = 1,
    target_hidden: int = HIDDEN,
    states: int = 3,
    draft_vocab: int | None = DRAFT_VOCAB,
    embeddings: bool = True,
    files: str = "safetensors",
    kind: str = "eagle3",
    **config: Any,
) -> Path:
    """Write an EAGLE-3 checkpoint; `config` has more settings, for the layers or around them."""
    random = Random(seed)
    first = "midlayer" if layout == "original" else "layers.0"
    random.matrix("fc", HIDDEN, states * target_hidden)
    random.norm(f"{first}.input_layernorm", HIDDEN)
    random.norm(f"{first}.hidden_norm", HIDDEN)
    more = {"bias": config.get("attention_bias", False), "qk_norm": config.get("model_type") == "qwen3"}
    random.layer(first, inputs=2 * HIDDEN, **more)
    for number in range(1, layers):
        random.norm(f"layers.{number}.input_layernorm", HIDDEN)
        random.layer(f"layers.{number}", **more)
    random.norm("norm", HIDDEN)
    random.matrix("lm_head", draft_vocab or VOCAB, HIDDEN)
    if embeddings:
        random.matrix("embed_tokens", VOCAB, HIDDEN)
        random.weights["embed_tokens.weight"] *= HIDDEN**0.5
    if draft_vocab:
        random.drafted_ids(draft_vocab)
    if config.get("fc_norm"):
        for number in range(states):
            random.norm(f"fc_norm.{number}", target_hidden)
    if config.get("norm_before_fc") or config.get("eagle_config", {}).get("norm_before_fc"):
        random.norm("input_norm", states * target_hidden)
    if kind == "peagle":
        random.matrix("mask_hidden", 1, states * target_hidden)
        random.weights["mask_hidden"] = random.weights.pop("mask_hidden.weight") * 20
    body = LLAMA | {"num_hidden_layers": layers}
    around = {"draft_vocab_size": draft_vocab}
    if target_hidden != HIDDEN:
        around["target_hidden_size"] = target_hidden
    if layout == "original":
        values = body | around | {"architectures": ["LlamaForCausalLMEagle3"]} | config
    else:
        values = speculators(kind, body, around, config)
    return write(folder, {name: value for name, value in values.items() if value is not None}, random.weights, files)


def eagle(folder: Path, *, seed: int = 1, layers: int = 1, bias: bool = False, embeddings: bool = False) -> Path:
    """Write an EAGLE-1 or EAGLE-2 checkpoint."""
    random = Random(seed)
    random.matrix("fc", HIDDEN, 2 * HIDDEN, bias=bias)
    random.layer("layers.0")
    for number in range(1, layers):
        random.norm(f"layers.{number}.input_layernorm", HIDDEN)
        random.layer(f"layers.{number}")
    if embeddings:
        random.matrix("embed_tokens", VOCAB, HIDDEN)
    config = LLAMA | {"num_hidden_layers": layers, "architectures": ["LlamaForCausalLM"]}
    return write(folder, config, random.weights)


def mimo(folder: Path, *, seed: int = 1) -> Path:
    """Write the files of a MiMo target: some of its own weights, and the module that predicts further tokens."""
    random = Random(seed)
    name = "model.mtp_layers.0"
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm"):
        random.norm(f"{name}.{norm}", HIDDEN)
    random.matrix(f"{name}.input_proj", HIDDEN, 2 * HIDDEN)
    random.layer(name, bias=True)
    del random.weights[f"{name}.self_attn.o_proj.bias"]
    random.layer("model.layers.0", bias=True)
    random.norm("model.norm", HIDDEN)
    random.matrix("model.embed_tokens", VOCAB, HIDDEN)
    random.matrix("lm_head", VOCAB, HIDDEN)
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    more = {"num_hidden_layers": 6, "num_nextn_predict_layers": 1}
    return write(folder, LLAMA | config | more, random.weights, "sharded")


def deepseek(folder: Path, *, seed: int = 1, low_rank: bool = True, **config: Any) -> Path:
    """Write the files of a DeepSeek V3 target: some of its own weights, and the module behind its last layer."""
    random, name = Random(seed), "model.layers.6"
    plain, rotary, values, rank = 24, 16, 20, 32
    if low_rank:
        random.matrix(f"{name}.self_attn.q_a_proj", 48, HIDDEN)
        random.norm(f"{name}.self_attn.q_a_layernorm", 48)
        random.matrix(f"{name}.self_attn.q_b_proj", HEADS * (plain + rotary), 48)
    else:
        random.matrix(f"{name}.self_attn.q_proj", HEADS * (plain + rotary), HIDDEN)
    random.matrix(f"{name}.self_attn.kv_a_proj_with_mqa", rank + rotary, HIDDEN)
    random.norm(f"{name}.self_attn.kv_a_layernorm", rank)
    random.matrix(f"{name}.self_attn.kv_b_proj", HEADS * (plain + values), rank)
    random.matrix(f"{name}.self_attn.o_proj", HIDDEN, HEADS * values)
    _behind_last_layer(random, name)
    sizes = {"qk_nope_head_dim": plain, "qk_rope_head_dim": rotary, "v_head_dim": values, "kv_lora_rank": rank}
    body = {name: value for name, value in LLAMA.items() if name != "head_dim"} | EXPERTS | sizes
    body |= {"q_lora_rank": 48 if low_rank else None, "architectures": ["DeepseekV3ForCausalLM"]}
    body |= {"model_type": "deepseek_v3", "num_key_value_heads": HEADS, "num_hidden_layers": 6, "n_group": 4}
    body |= {"topk_group": 2, "rope_scaling": YARN}
    more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False}
    return write(folder, body | more | config, random.weights, "sharded")


def glm(folder: Path, *, seed: int = 1, qk_norm: bool = True) -> Path:
    """Write the files of a GLM-4.5 target, likewise; its attention rotates half of each head."""
    random, name = Random(seed), "model.layers.6"
    random.attention(f"{name}.self_attn", bias=True, qk_norm=qk_norm)
    del random.weights[f"{name}.self_attn.o_proj.bias"]
    _behind_last_layer(random, name)
    body = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": qk_norm}
    more = {"attention_bias": True, "partial_rotary_factor": 0.5, "num_hidden_layers": 6, "n_group": 1, "topk_group": 1}
    return write(folder, LLAMA | EXPERTS | body | more, random.weights, "sharded")


EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def _behind_last_layer(random: Random, name: str) -> None:
    """Add the experts and the inputs and outputs of a module in DeepSeek's layout, beside its target's own tensors."""
    inner = int(EXPERTS["moe_intermediate_size"])
    random.matrix(f"{name}.mlp.gate", EXPERTS["n_routed_experts"], HIDDEN)
    random.vector(f"{name}.mlp.gate.e_score_correction_bias", EXPERTS["n_routed_experts"])
    for number in range(EXPERTS["n_routed_experts"]):
        random.mlp(f"{name}.mlp.experts.{number}", inner)
    random.mlp(f"{name}.mlp.shared_experts", inner * EXPERTS["n_shared_experts"])
    norms = ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm")
    for norm in norms:
        random.norm(f"{name}.{norm}", HIDDEN)
    random.matrix(f"{name}.eh_proj", HIDDEN, 2 * HIDDEN)
    for matrix in (f"{name}.embed_tokens", f"{name}.shared_head.head", "model.embed_tokens", "lm_head"):
        random.matrix(matrix, VOCAB, HIDDEN)
    random.weights[f"{name}.embed_tokens.weight"] = random.weights["model.embed_tokens.weight"].clone()  # as released
    random.norm("model.layers.5.input_layernorm", HIDDEN)
    random.norm("model.norm", HIDDEN)


def qwen(folder: Path, *, seed: int = 1, layout: str = "original") -> Path:
    """Write the files of a Qwen3-Next target, or its module in the layout of `speculators`."""
    random, experts, inner, layer = Random(seed), 8, 32, "mtp.layers.0"
    random.attention(f"{layer}.self_attn", qk_norm=True, gate=True, centre=0.0)
    random.matrix(f"{layer}.mlp.gate", experts, HIDDEN)
    for number in range(experts):
        random.mlp(f"{layer}.mlp.experts.{number}", inner)
    random.mlp(f"{layer}.mlp.shared_expert", 48)
    random.matrix(f"{layer}.mlp.shared_expert_gate", 1, HIDDEN)
    of_layer = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    for norm in (*of_layer, "mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"):
        random.norm(norm, HIDDEN, 0.0)
    random.matrix("mtp.fc", HIDDEN, 2 * HIDDEN)
    body = LLAMA | {"model_type": "qwen3_next", "num_hidden_layers": 6, "attention_bias": False}
    body |= {"layer_types": ["linear_attention", "full_attention"] * 3, "partial_rotary_factor": 0.25}
    body |= {"num_experts": experts, "num_experts_per_tok": 3, "moe_intermediate_size": inner}
    body |= {"shared_expert_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1}
    if layout == "speculators":
        weights = _apart(random.weights, experts)
        return write(folder, speculators("mtp", body, {"num_nextn_predict_layers": 1}, {}), weights)
    random.norm("model.norm", HIDDEN, 0.0)
    random.matrix("model.embed_tokens", VOCAB, HIDDEN)
    random.matrix("lm_head", VOCAB, HIDDEN)
    return write(folder, body | {"architectures": ["Qwen3NextForCausalLM"]}, random.weights, "sharded")


_APART = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}


def _apart(weights: Weights, experts: int) -> Weights:
    """Return a module under the names of `speculators`, whose converter stacks the experts."""
    ours = {}
    for name, weight in weights.items():
        start = next(start for start in _APART if name.startswith(start))
        ours[_APART[start] + name.removeprefix(start)] = weight
    each = [f"mtp_layers.0.mlp.experts.{number}" for number in range(experts)]
    pairs = [torch.cat([ours.pop(f"{one}.gate_proj.weight"), ours.pop(f"{one}.up_proj.weight")]) for one in each]
    ours["mtp_layers.0.mlp.experts.gate_up_proj"] = torch.stack(pairs)
    ours["mtp_layers.0.mlp.experts.down_proj"] = torch.stack([ours.pop(f"{one}.down_proj.weight") for one in each])
    return ours


def together(weights: Weights) -> Weights:
    """Return the weights of `_apart` under the names of the target's own files."""
    theirs = {}
    for name, weight in weights.items():
        start = next((start for start in _APART if name.startswith(_APART[start])), "")
        theirs[start + name.removeprefix(_APART[start])] = weight
    down = theirs.pop("mtp.layers.0.mlp.experts.down_proj")
    for number, both in enumerate(theirs.pop("mtp.layers.0.mlp.experts.gate_up_proj")):
        one = f"mtp.layers.0.mlp.experts.{number}"
        theirs[f"{one}.gate_proj.weight"], theirs[f"{one}.up_proj.weight"] = both.chunk(2)
        theirs[f"{one}.down_proj.weight"] = down[number]
    return theirs


def dflash(
    folder: Path,
    *,
    seed: int = 1,
    layout: str = "original",
    kind: str = "dflash",
    markov: str = "vanilla",
    **config: Any,
) -> Path:
    """Write a DFlash or DSpark checkpoint."""
    random = Random(seed)
    layers, rank = 2, 16
    random.matrix("fc", HIDDEN, layers * HIDDEN)
    random.norm("hidden_norm", HIDDEN)
    for number in range(layers):
        random.norm(f"layers.{number}.input_layernorm", HIDDEN)
        random.layer(f"layers.{number}", qk_norm=True)
    random.norm("norm", HIDDEN)
    around: dict[str, Any] = {"block_size": 6}
    if layout == "speculators":
        random.matrix("embed_tokens", VOCAB, HIDDEN)
        random.matrix("lm_head", DRAFT_VOCAB, HIDDEN)
        random.drafted_ids(DRAFT_VOCAB)
        around["draft_vocab_size"] = DRAFT_VOCAB
    if kind == "dspark":
        random.matrix("markov_head.markov_w1", VOCAB, rank)
        random.matrix("markov_head.markov_w2", around.get("draft_vocab_size", VOCAB), rank)
        random.matrix("confidence_head.proj", 1, HIDDEN + rank, bias=True)
        if markov == "gated":
            random.matrix("markov_head.gate_proj", rank, HIDDEN + rank, bias=True)
        if markov == "rnn":
            random.matrix("markov_head.joint_proj", 3 * rank, 2 * rank + HIDDEN, bias=True)
        around |= {"markov_rank": rank, "markov_head_type": markov}
        around |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    body = LLAMA | {"model_type": "qwen3", "num_hidden_layers": layers}
    if layout == "speculators":
        values = speculators(kind, body, around, {"aux_hidden_state_layer_ids": [2, 4], "mask_token_id": 5} | config)
        return write(folder, values, random.weights)
    own: dict[str, Any] = {"mask_token_id": 5, "target_layer_ids": [1, 3]}
    own = own if kind == "dspark" else {"dflash_config": own}
    architecture = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}[kind]
    return write(
        folder, body | around | own | {"architectures": [architecture], "num_target_layers": 6} | config, random.weights
    )


_OF_LAYERS = {"model_type", "attention_bias", "rope_scaling", "rope_theta", "layer_types"}


def speculators(kind: str, body: dict[str, Any], around: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of the `speculators` library."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": "toys/target", "architectures": ["LlamaForCausalLM"]}
    inner = {name: value for name, value in config.items() if name in _OF_LAYERS}
    outer = {name: value for name, value in config.items() if name not in _OF_LAYERS}
    return {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": body | inner,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        **around,
        **outer,
    }


def write(folder: Path, config: Mapping[str, Any], weights: Weights, files: str = "safetensors") -> Path:
    """Write a checkpoint as one safetensors file, as shards, or as a `.bin` file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    if files == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif files == "safetensors":
        save_file(weights, folder / "model.safetensors")
    else:
        names = sorted(weights)
        shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for shard, held in shards.items():
            save_file({name: weights[name] for name in held}, folder / shard)
        placed = {name: shard for shard, held in shards.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


Maker = Callable[[Path], Path]
CASES: dict[str, Maker] = {
    "eagle3": eagle3,
    "eagle3-bare": partial(eagle3, seed=2, draft_vocab=None, embeddings=False, files="bin"),
    "eagle3-modelopt": partial(
        eagle3,
        seed=3,
        states=2,
        target_hidden=64,
        files="sharded",
        rope_scaling=LLAMA3_ROPE,
        norm_before_residual=True,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3], "norm_before_fc": True, "use_aux_hidden_state": True},
    ),
    "eagle3-speculators": partial(eagle3, seed=4, layout="speculators", layers=2, attention_bias=True),
    "eagle3.1-speculators": partial(
        eagle3, seed=5, layout="speculators", model_type="qwen3", fc_norm=True, norm_output=True
    ),
    "eagle": eagle,
    "eagle-layers": partial(eagle, seed=2, layers=2, embeddings=True),
    "mimo-mtp": mimo,
    "deepseek-mtp": deepseek,
    "deepseek-mtp-full": partial(deepseek, seed=2, low_rank=False),
    "glm-mtp": glm,
    "qwen-mtp": qwen,
    "mtp-speculators": partial(qwen, seed=3, layout="speculators"),
    "peagle": partial(eagle3, seed=6, layout="speculators", kind="peagle", layers=2, mask_token_id=5),
    "dflash": dflash,
    "dflash-speculators": partial(dflash, seed=2, layout="speculators"),
    "dspark": partial(dflash, seed=3, kind="dspark"),
    "dspark-speculators": partial(dflash, seed=4, kind="dspark", layout="speculators"),
    "dspark-gated": partial(dflash, seed=5, kind="dspark", markov="gated"),
    "dspark-rnn": partial(dflash, seed=6, kind="dspark", layout="speculators", markov="rnn"),
}
BLOCKS = {"peagle", "dflash", "dspark"}  # of formats that guess a block in one pass


@dataclass(frozen=True)
class Call:
    """One pass of a drafter: drop the rows after `cut`, then append rows for these tokens.

    `states` are the target's, before projection. None: the rows continue from the hidden state that the drafter gave
    for its last row. `masks` rows stand for tokens that are not known.
    """

    cut: int
    tokens: torch.Tensor
    states: torch.Tensor | None
    masks: int = 0


def calls(name: str, checkpoint: Path, rounds: int = 14) -> Iterator[Call]:
    """Yield a prompt, and rounds of guesses and a rollback to what of them was accepted."""
    random = torch.Generator().manual_seed(1000 + len(name))
    width, masks = state_width(checkpoint), 5 if name.partition("-")[0] in BLOCKS else 0
    committed = 0
    for number in range(rounds):
        count = 7 if number == 0 else 1 + number % 4
        tokens = torch.randint(VOCAB, (count,), generator=random)
        yield Call(committed, tokens, torch.randn(count, width, generator=random), masks)
        committed += count
        for ahead in range(0 if masks else 2 + number % 3):
            yield Call(committed + ahead, torch.randint(VOCAB, (1,), generator=random), None)


def previous_tokens(call: Call, count: int) -> torch.Tensor:
    """Return the token before each guess of a block: the anchor, and then what a sampler may have drawn."""
    drawn = torch.randint(VOCAB, (count - 1,), generator=torch.Generator().manual_seed(call.cut))
    return torch.cat([call.tokens[-1:], drawn])


def target_embeddings() -> torch.Tensor:
    """Return the embeddings of a target, for checkpoints that have none."""
    return 0.2 * torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(99))


def state_width(checkpoint: Path) -> int:
    """Return the width of the target's states of one token, side by side."""
    weights = weights_of(checkpoint)
    if any(name.endswith("hidden_norm.weight") for name in weights):
        return weights["fc.weight"].shape[1]
    return HIDDEN


def target_hidden(checkpoint: Path) -> int:
    config = json.loads((checkpoint / "config.json").read_text())
    return int(config.get("target_hidden_size") or HIDDEN)


def weights_of(checkpoint: Path) -> Weights:
    """Return all tensors of a checkpoint."""
    if (checkpoint / "pytorch_model.bin").is_file():
        loaded: Weights = torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
        return loaded
    parts = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    return {name: weight for part in parts for name, weight in part.items()}


_SILENT = {"o_proj.weight", "o_proj.bias", "down_proj.weight", "markov_w2.weight", "proj.weight"}
_SILENT |= {"fc.weight", "input_proj.weight", "eh_proj.weight"}
# What mixes a row's two sides in modules of targets, and where the embedding begins.
_MIXERS = {"model.mtp_layers.0.input_proj": HIDDEN, "mtp.fc": 0, "model.layers.6.eh_proj": 0}


def agreeing(checkpoint: Path, target: Weights) -> Path:
    """Change a checkpoint so that it guesses by the last token alone, with the target's own embeddings and head.

    Where only attention reads that token, each row attends to itself, and half of its embedding passes through.
    """
    weights, config = weights_of(checkpoint), json.loads((checkpoint / "config.json").read_text())
    _silence(weights, target)
    if "confidence_head.proj.bias" in weights:
        weights["confidence_head.proj.bias"].fill_(10.0)
    if "norm.weight" not in weights and "fc.weight" in weights:  # EAGLE-1
        weights["fc.weight"][:, :HIDDEN] = 5 * torch.eye(HIDDEN)
    for mixer, at in _MIXERS.items():
        if f"{mixer}.weight" in weights:
            weights[f"{mixer}.weight"][:, at : at + HIDDEN] = torch.eye(HIDDEN)
    for first in ("midlayer.self_attn", "layers.0.self_attn"):
        if weights.get(f"{first}.q_proj.weight", torch.empty(0, 0)).shape[1] == 2 * HIDDEN:
            _pass_embedding(weights, first)
    for file in checkpoint.glob("*.safetensors*"):
        file.unlink()
    return write(checkpoint, config, weights)


def _silence(weights: Weights, target: Weights) -> None:
    """Let no layer add anything, and take embeddings and head from the target."""
    head = target["lm_head.weight"]
    if "d2t" in weights:
        head = head[torch.arange(len(weights["d2t"])) + weights["d2t"]]
    copied = {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": head}
    copied["shared_head.head.weight"] = head
    unit = 0.0 if "mtp.fc.weight" in weights else 1.0
    for name, weight in weights.items():
        end = ".".join(name.split(".")[-3 if "shared_head" in name else -2 :])
        if end in copied:
            weight.copy_(copied[end])
        elif end in _SILENT:
            weight.zero_()
        elif end.endswith("norm.weight"):
            weight.fill_(unit)


def _pass_embedding(weights: Weights, attention: str) -> None:
    """Let each row attend to itself, by equal queries and keys that rotation alone tells apart."""
    kv_width = KV_HEADS * HEAD_DIM
    for side in ("q_proj", "k_proj"):
        weights[f"{attention}.{side}.weight"].zero_()
        weights[f"{attention}.{side}.bias"].fill_(30.0)
    weights[f"{attention}.v_proj.weight"].zero_()[:, :kv_width] = torch.eye(kv_width)
    weights[f"{attention}.v_proj.bias"].zero_()
    for kv_head in range(KV_HEADS):  # read by the first of the heads that share it
        values = slice(kv_head * HEAD_DIM, (kv_head + 1) * HEAD_DIM)
        read = slice(kv_head * HEADS // KV_HEADS * HEAD_DIM, kv_head * HEADS // KV_HEADS * HEAD_DIM + HEAD_DIM)
        weights[f"{attention}.o_proj.weight"][values, read] = torch.eye(HEAD_DIM)
