"""The identity of a loaded model: its description, its fingerprint and its weights digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import structlog
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo, SamplingDefaults
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.vocabulary import Vocabulary

log = structlog.get_logger(__name__)

_SAMPLED_WEIGHTS = 64
_UNKNOWN_CONTEXT = 1 << 20  # tokens of context where neither the model nor its tokenizer names a length


@dataclass(frozen=True, slots=True)
class WeightSample:
    """Some values of one weight, evenly spread."""

    name: str
    shape: tuple[int, ...]
    values: torch.Tensor  # in the number format of the loaded weight

    @classmethod
    def of(cls, name: str, weight: torch.Tensor) -> WeightSample:
        if rows := getattr(weight, "quantized", None):
            return cls(name, tuple(weight.shape), rows.sample(sample_stride(weight.numel())).to(weight.dtype))
        own = weight.detach()
        flat = getattr(own, "full_tensor", lambda: own)().reshape(-1)  # of ranks' shares the whole, made by all ranks
        return cls(name, tuple(weight.shape), flat[:: sample_stride(flat.numel())].cpu())


def sample_stride(num_values: int) -> int:
    """Return the distance between the sampled values of a weight."""
    return max(1, num_values // _SAMPLED_WEIGHTS)


def describe(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    quantization: str = "none",
    samples: Sequence[WeightSample] = (),
) -> ModelInfo:
    """Return what a worker publishes; `samples` stand for weights that are not loaded, as on torch's device `meta`."""
    samples = samples or [WeightSample.of(key, weight) for key, weight in model.state_dict(keep_vars=True).items()]
    dtype = str(samples[0].values.dtype).removeprefix("torch.") if quantization == "none" else quantization
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(model, vocabulary, samples, quantization),
        weights_digest=weights_digest(model, vocabulary, samples),
        architecture=type(model).__name__,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        vocabulary_digest=vocabulary.digest,
        context_length=int(context or min(tokenizer.model_max_length, _UNKNOWN_CONTEXT)),
        eos_token_ids=_end_tokens(model, tokenizer),
        dtype=dtype,
        device=str(next(model.parameters()).device),
        parameters=sum(p.numel() for p in model.parameters()),
        sampling=_recommended(getattr(model, "generation_config", None)),
    )


def fingerprint(
    model: PreTrainedModel, vocabulary: Vocabulary, samples: Sequence[WeightSample], quantization: str = "none"
) -> str:
    """Return a digest of everything that decides the text: architecture, number format, vocabulary, sampled weights."""
    digest = hashlib.sha256(f"{type(model).__name__} {vocabulary.digest}".encode())
    if quantization != "none":
        digest.update(quantization.encode())
    for sample in samples:
        digest.update(f"{sample.name} {sample.shape} {sample.values.dtype}".encode())
        digest.update(sample.values.to(torch.float64).numpy().tobytes())
    changing = ("transformers_version", "dtype", "torch_dtype", "distributed_config")
    config = {key: it for key, it in model.config.to_dict().items() if not key.startswith("_") and key not in changing}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def weights_digest(model: PreTrainedModel, vocabulary: Vocabulary, samples: Sequence[WeightSample]) -> str:
    """Return a digest of the weights, equal in all number formats: a trained drafter names its target by it."""
    digest = hashlib.sha256(f"{type(model).__name__} {vocabulary.digest}".encode())
    for sample in samples:
        digest.update(f"{sample.name} {sample.shape}".encode())
        digest.update(sample.values.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def _recommended(generation: Any) -> SamplingDefaults:
    """Return the sampling parameters of a generation_config.json, unless no request can have them."""
    named = {field.name: getattr(generation, field.name, None) for field in fields(SamplingDefaults)}
    given = {name: value for name, value in named.items() if value not in (None, -1)}  # the latter: all are kept
    try:
        SamplingParams(**given).check()
    except (InvalidRequest, TypeError) as error:
        log.warning("sampling defaults of generation_config.json are ignored", error=str(error))
        return SamplingDefaults()
    return SamplingDefaults(**given)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the end tokens of transformers' generate, and the tokenizer's, as far as the model can write them."""
    # A configuration that names none has its family's, which may be any token. Its text part may name them alone.
    parts: Any = (getattr(model, "generation_config", None), model.config, model.config.get_text_config())
    named = (getattr(part, "eos_token_id", None) for part in parts)
    first: Any = next((ends for ends in named if ends not in (None, [])), [])
    ends = {tokenizer.eos_token_id, *(first if isinstance(first, list) else [first])}
    return tuple(sorted(int(end) for end in ends if end in range(len(model.get_output_embeddings().weight))))
