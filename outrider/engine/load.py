"""Finding, converting and loading models, and saying what they are.

A model is named by a local directory, a GGUF file, a hub id, or `default`
(see `outrider.models`). Weights come from safetensors or GGUF only and no
code from a model repository is ever run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from outrider.engine.attention import NAME as RAGGED_ATTENTION
from outrider.engine.interface import Rows
from outrider.engine.transformers_engine import TransformersEngine
from outrider.errors import ModelMismatch, StartupError
from outrider.messages import ModelInfo
from outrider.models import locate
from outrider.vocabulary import Vocabulary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Stages are reported by our own `progress`; bars would only fill the logs.
disable_progress_bar()

_SAMPLED_WEIGHTS = 64
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    engine: TransformersEngine
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary


def load_model(
    name: str, *, device: str = "auto", dtype: str = "auto", progress: Callable[[str], None] = lambda _: None
) -> LoadedModel:
    """Load a model and prove with a real step that it runs. Raises StartupError with what to do about it."""
    place = pick_device(device)
    path = locate(name, progress)
    progress(f"loading {name}")
    options = _source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**options)
        model = AutoModelForCausalLM.from_pretrained(
            **options,
            dtype=pick_dtype(dtype, place),
            attn_implementation=RAGGED_ATTENTION,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(
            f"cannot load model {name!r}: {error}", field="target", value=name, limit="a model with safetensors or GGUF"
        ) from error
    model = model.to(place).eval()
    vocabulary = Vocabulary.of(tokenizer)
    info = describe(Path(path).name, model, tokenizer, vocabulary)
    engine = TransformersEngine(model, info)
    progress("warming up")
    warm_up(engine)
    return LoadedModel(engine, tokenizer, vocabulary)


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise StartupError(
            f"unknown device {device!r}", field="device", value=device, limit="auto, cpu, cuda:N"
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("no CUDA device is usable here", field="device", value=device, limit="auto or cpu")
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where it is exact; bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise StartupError(f"unknown dtype {dtype!r}", field="dtype", value=dtype, limit=", ".join(["auto", *DTYPES]))
    return DTYPES[dtype]


def warm_up(engine: TransformersEngine) -> None:
    """Run a step, a guess block and a rollback: a worker serves only when this works."""
    session = "warm-up"
    length = min(_WARM_UP_TOKENS, engine.info.context_length - 2)
    engine.extend([Rows(session, [0] * length)])
    logits = engine.extend([Rows(session, [0, 0], (-1, -1))]).logits[0]
    engine.keep(session, length, [1])
    engine.free(session)
    if not bool(torch.isfinite(logits.float()).all()):
        raise ModelMismatch(
            "the model answers NaN or infinity; try another dtype", field="dtype", value=engine.info.dtype
        )


def describe(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary
) -> ModelInfo:
    config = model.config.get_text_config()
    parameter = next(model.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(model, vocabulary),
        architecture=type(model).__name__,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        vocabulary_digest=vocabulary.digest,
        context_length=int(getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length),
        eos_token_ids=_end_tokens(model, tokenizer),
        dtype=dtype,
        device=str(parameter.device),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def fingerprint(model: PreTrainedModel, vocabulary: Vocabulary) -> str:
    """A digest that differs when the text could: architecture, number format, vocabulary, samples of the weights."""
    digest = hashlib.sha256()
    digest.update(f"{type(model).__name__} {vocabulary.digest}".encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLED_WEIGHTS)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(flat[::stride].cpu().to(torch.float64).numpy().tobytes())
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    for changing in ("transformers_version", "dtype", "torch_dtype"):
        config.pop(changing, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """As transformers' generate ends: the generation config's ids, else the configuration's, and the tokenizer's."""
    ends: set[int] = set()
    generation: Any = getattr(model, "generation_config", None)
    for source in (getattr(generation, "eos_token_id", None), model.config.eos_token_id, tokenizer.eos_token_id):
        if source is not None:
            ends.update(source if isinstance(source, list) else [source])
    return tuple(sorted(ends))


def _source(path: Path | str) -> dict[str, Any]:
    """How from_pretrained is told where a model lies."""
    if isinstance(path, Path) and path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path), "trust_remote_code": False}


def convert_gguf(source: Path, into: Path) -> None:
    """Dequantise a GGUF file and save it as safetensors with its tokenizer, so that loading takes seconds."""
    options = _source(source)
    quantised = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model: the loaded one still counts as quantised and refuses to be saved.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(into)
    for weights in into.glob("*.safetensors"):
        weights.chmod(0o644)  # readable for whoever serves it
    AutoTokenizer.from_pretrained(**options).save_pretrained(into)
