"""Model sources for from_pretrained, and the conversion of GGUF files to safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def pretrained_source(path: Path | str) -> dict[str, Any]:
    """Return the arguments of from_pretrained for a directory, a GGUF file or a hub id."""
    if isinstance(path, Path) and path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path), "trust_remote_code": False}


def convert_gguf(source: Path, into: Path) -> None:
    """Dequantise a GGUF file and save it as safetensors with its tokenizer, so that loading takes seconds."""
    options = pretrained_source(source)
    quantised = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers refuses to save a model that was loaded as quantised.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(into)
    for weights in into.glob("*.safetensors"):
        weights.chmod(0o644)  # services may run as other users
    AutoTokenizer.from_pretrained(**options).save_pretrained(into)
