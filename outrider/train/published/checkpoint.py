"""The folder of a trained drafter in the layout of the `speculators` library: config.json and model.safetensors."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from outrider.base.atomic_files import atomic_write
from outrider.protocol.errors import StartupError
from outrider.train.artifacts.eagle import EagleShape
from outrider.train.methods.interface import TrainingInputs
from outrider.train.published.dspark import Dspark, DsparkShape
from outrider.train.published.eagle3 import Eagle3, Eagle3Shape

MODEL = "model.safetensors"
_VERSION = "0.9.0"  # of the library, whose files these are
_SPECULATIVE_TOKENS = 4  # that an engine takes if its operator names no number
_FEW_LAYERS = 6


def state_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose states are read: an early one, the middle and a late one, if the target has three."""
    if not num_layers:
        raise StartupError(
            "this method needs hidden states of single layers, which this target does not give", field="target"
        )
    late = num_layers - 3 if num_layers > _FEW_LAYERS else num_layers
    return tuple(sorted({min(2, num_layers), max(1, num_layers // 2), late}))


class TrainedCheckpoint:
    """Base of the methods: a module for a target, and its files."""

    def __init__(self, inputs: TrainingInputs, module: Eagle3 | Dspark) -> None:
        for name, weight in module.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data.zero_()  # at first the layers add nothing to the residual
        self._target_config = inputs.target.config.get_text_config()
        self.module = module
        self.shape = asdict(module.shape) | {"states": list(module.shape.states)}
        self._target_weights = inputs.target_weights
        self._drafted = inputs.target_weights.cut(module.ids)

    @staticmethod
    def dimensions(target: PreTrainedModel) -> dict[str, Any]:
        """Return those of a drafter for a target."""
        own = asdict(EagleShape.like(target))
        del own["layers"]  # those of the drafter are chosen
        head_dim = own["head_dim"] or own["hidden"] // own["heads"]
        return own | {"head_dim": head_dim, "states": state_layers(target.config.get_text_config().num_hidden_layers)}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the checkpoint."""
        return published_weights(self.module, self._target_weights.head)

    def save_config(self, folder: Path, target: str) -> None:
        """Write the configuration beside the weights."""
        save_config(folder, self.module, target, self._target_config)


def published_weights(module: Eagle3 | Dspark, head: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of the checkpoint."""
    ids = module.ids.cpu()
    drafted = torch.zeros(len(module.embeddings), dtype=torch.bool)
    drafted[ids] = True
    weights = module.state_dict() | {"embed_tokens.weight": module.embeddings, "lm_head.weight": head[module.ids]}
    numbers = {name: each.detach().cpu().to(torch.bfloat16) for name, each in weights.items() if name != "mask"}
    if len(ids) == len(module.embeddings):  # vLLM refuses a map of ids that it does not need
        return numbers
    return numbers | {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def save_config(folder: Path, module: Eagle3 | Dspark, target: str, config: PretrainedConfig) -> None:
    """Write what vLLM, SGLang and Outrider read first. `config` is the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    described = _config(module.shape, len(module.ids), len(module.embeddings))
    method = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    described["speculators_config"] = {
        "algorithm": described["speculators_model_type"],
        "default_proposal_method": "greedy",
        "proposal_methods": [method | {"speculative_tokens": described.get("block_size", _SPECULATIVE_TOKENS)}],
        "verifier": {"name_or_path": target, "architectures": list(config.architectures or ())},
    }
    with atomic_write(folder / "config.json") as file:
        file.write_text(json.dumps(described, indent=2) + "\n")


def _config(shape: Eagle3Shape, drafted: int, vocab: int) -> dict[str, Any]:
    layers = {
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
        "tie_word_embeddings": False,
    }
    common = {
        "speculators_version": _VERSION,
        "draft_vocab_size": drafted,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if isinstance(shape, DsparkShape):
        return common | {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "aux_hidden_state_layer_ids": list(shape.states),
            "block_size": shape.block,
            "mask_token_id": shape.mask,
            "sample_from_anchor": True,
            "markov_rank": shape.rank,
            "markov_head_type": shape.markov,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "transformer_layer_config": layers | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        }
    return common | {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.states),
        "transformer_layer_config": layers
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "mlp_bias": False,
            "num_aux_hidden_states": len(shape.states),  # vLLM takes 3 if it is not told here
        },
    }
