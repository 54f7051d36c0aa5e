"""The folder of a trained drafter in the layout of the `speculators` library: config.json and model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from outrider.base.atomic_files import atomic_write
from outrider.train.published.eagle3 import Eagle3, Eagle3Shape

MODEL = "model.safetensors"
_VERSION = "0.9.0"  # of the library, whose files these are
_SPECULATIVE_TOKENS = 4  # that an engine takes if its operator names no number


def published_weights(module: Eagle3, head: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of the checkpoint."""
    ids = module.ids.cpu()
    drafted = torch.zeros(len(module.embeddings), dtype=torch.bool)
    drafted[ids] = True
    weights = module.state_dict() | {"embed_tokens.weight": module.embeddings, "lm_head.weight": head[module.ids]}
    numbers = {name: weight.detach().cpu().to(torch.bfloat16) for name, weight in weights.items()}
    if len(ids) == len(module.embeddings):  # vLLM refuses a map of ids that it does not need
        return numbers
    return numbers | {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def save_config(folder: Path, module: Eagle3, target: str, config: PretrainedConfig) -> None:
    """Write what vLLM, SGLang and Outrider read first. `config` is the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "config.json") as file:
        sizes = len(module.ids), len(module.embeddings)
        described = _config(module.shape, *sizes, target, list(config.architectures or ()))
        file.write_text(json.dumps(described, indent=2) + "\n")


def _config(shape: Eagle3Shape, drafted: int, vocab: int, target: str, architectures: list[str]) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "draft_vocab_size": drafted,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(shape.states),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": shape.context,
            "rms_norm_eps": shape.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "num_aux_hidden_states": len(shape.states),  # vLLM takes 3 if it is not told here
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }
