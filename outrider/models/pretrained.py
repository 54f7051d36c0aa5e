"""Models as transformers makes them: with all their weights, or without memory for any."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils.logging import disable_progress_bar

from outrider.protocol.errors import StartupError

_LAYER = re.compile(r"([^.]+\.)*?\d+(?=\.)")  # of a weight's name, up to its number
# Saved by earlier releases of transformers, and scales of a quantised KV cache: they change no logits.
_BUFFER = re.compile(
    r"(inv_freq|_cached|mask(ed_bias)?|position_ids|\b(q|k|v|kv)_scale|\b(self_)?att(n|ention)\.bias)$"
)

# Stages are reported through `progress`; progress bars would fill the logs. That of GGUF files has no switch.
disable_progress_bar()
gguf_reader.tqdm = lambda tensors, **_: tensors


def auto_class(config: Any) -> Any:
    """Return transformers' class for language models, or for those that see images: they answer texts as well."""
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    raise StartupError.of("target", f"of type {config.model_type}", "a language model that transformers knows")


def dequantized(config: Any) -> Any:
    """Return a configuration by which weights in fp8 are converted: transformers asks only whether there is a GPU."""
    stored = getattr(config, "quantization_config", None) or {}
    if stored.get("quant_method") == "fp8":
        config.quantization_config = stored | {"dequantize": True}
    return config


def empty_model(config: Any, folder: Path | str = "") -> PreTrainedModel:
    """Return a model without memory for its weights, as a folder says how it ends."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config)
    if folder and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_whole(name: str, folder: Path | str, **loading: Any) -> PreTrainedModel:
    """Load a model, in float32 unless told otherwise; raise StartupError for weights missing or left out as scales."""
    loading = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False} | loading
    config = loading.setdefault("config", dequantized(AutoConfig.from_pretrained(folder, trust_remote_code=False)))
    try:
        model, found = auto_class(config).from_pretrained(folder, output_loading_info=True, **loading)
    except ImportError as error:  # of a package that reads a format
        stored = (getattr(config, "quantization_config", None) or {}).get("quant_method", "another format")
        limit = "not quantised, in fp8 or a GGUF file; or use --engine vllm, which reads more formats"
        raise StartupError.of("target", f"{name}, quantised by {stored}", limit) from error
    if missing := found["missing_keys"]:  # transformers would draw them
        raise StartupError.of("target", f"{name} without {', '.join(sorted(missing)[:3])}", "with all its weights")
    if unread := unread_beside(found["unexpected_keys"], dict(model.named_parameters())):
        raise StartupError.of("target", f"{name} with {', '.join(unread[:3])}", "without tensors that no model reads")
    for weight in model.parameters():  # beside layers that were in fp8, transformers leaves all others in 16 bits
        if loading["dtype"] == torch.float32 and weight.dtype in (torch.bfloat16, torch.float16):
            weight.data = weight.data.float()
    return model


def unread_beside(stored: Iterable[str], wanted: Collection[str]) -> list[str]:
    """Return the stored tensors that a model does not read although it reads others of their module or layer."""
    read = {name.removesuffix(".weight") for name in wanted} | {at[0] for at in map(_LAYER.match, wanted) if at}
    unread = (each for each in stored if each not in wanted and not _BUFFER.search(each))
    return sorted(each for each in unread if not read.isdisjoint(accumulate(each.split(".")[:-1], "{}.{}".format)))
