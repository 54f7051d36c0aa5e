"""The selection of an engine for a loaded model: each candidate is checked against the model before it serves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from outrider.base.config import KV_TOKENS
from outrider.engine.checks.conformance import Differs, check_logits, check_supported, check_windows
from outrider.engine.checks.passed import record_of
from outrider.engine.cuda.engine import CudaGraphEngine
from outrider.engine.interface import Engine, SessionTokens
from outrider.engine.loading.options import DTYPES, EngineOptions
from outrider.engine.model_spec import ModelSpec, UnsupportedModel, build_spec
from outrider.engine.native import KINDS, NativeEngine, NoCompiler, dequantize
from outrider.engine.paged.arithmetic import combine
from outrider.engine.paged.engine import PagedEngine
from outrider.engine.tensor_parallel import RankGroup, TensorParallelEngine
from outrider.engine.transformers.engine import TransformersEngine
from outrider.engine.transformers.rope import fix_rotations
from outrider.models.hub import Progress
from outrider.models.in_place import detach_rows
from outrider.protocol.errors import OutriderError, StartupError, shorten
from outrider.protocol.fleet import ModelInfo

_DAMAGED = ", a file of it may not be read, is damaged or missing, copy or download it again"
_TOLD = {  # what the errors of transformers with these words mean
    "the backend tokenizer": ", it has no tokenizer, copy its tokenizer.json too",
    "ignore_mismatched_sizes": ", its weights have other shapes than its config.json says",
    "alidation error for field": ", its config.json or card.json cannot be used",  # vLLM's are for its settings
    "valid JSON": _DAMAGED,
}
_RULE_TOKENS = 2
_GPU_CACHE_SHARE = 0.9  # of the memory that is free once the weights are loaded, without the reserve
_GPU_RESERVE = 2 << 30  # for activations, graphs, and the parts of sums that attention joins
_CPU_EVICTABLE_SHARE = 8  # on a CPU, evictable cached blocks take at most one part in eight of the cache


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A model, with everything that an engine for it is made from."""

    model: PreTrainedModel
    info: ModelInfo
    options: EngineOptions
    cache: Mapping[str, Any]  # an engine's arguments for its KV cache
    progress: Progress
    record: Path | None  # of a passed start-up check
    passed: bool

    @property
    def weights(self) -> str:
        """Return the format in which weights are read."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        return dtype if self.options.quantization == "none" else self.options.quantization


def make_engine(
    model: PreTrainedModel,
    info: ModelInfo,
    options: EngineOptions,
    progress: Progress,
    rank_group: RankGroup | None = None,
) -> Engine:
    """Return the engine that `options` name, or the fastest one whose logits match the model's.

    Raises StartupError where there is none, UnsupportedModel where only another engine could run a model in blocks.
    """
    with startup_errors(info.name, info.architecture):
        context = fix_rotations(model, info.context_length)
        record = record_of(model, info, options)
        passed = record is not None and os.access(record, os.F_OK)
        if not passed:
            check_supported(model, context)
        kv_tokens = options.kv_tokens or (KV_TOKENS if rank_group else _fitting_tokens(model, info))
    evictable = options.prefix_tokens
    if evictable is None and model.device.type == "cpu":
        evictable = kv_tokens // _CPU_EVICTABLE_SHARE
    cache = {"kv_tokens": kv_tokens, "evictable_tokens": evictable}
    if context < info.context_length:
        progress(f"context limited to {context} of {info.context_length} tokens: beyond it all rotations change")
        info = replace(info, context_length=context)
    candidate = _Candidate(model, info, options, cache, progress, record, passed)
    if rank_group is not None:
        share = _transformers_engine(candidate)
        _sign_fingerprint(share, f"{share.arithmetic}, {rank_group.size} ranks")
        return TensorParallelEngine(share, rank_group) if rank_group.is_leader else share
    name, engine = _select(candidate)
    progress(f"engine {name} on {model.device}, weights in {candidate.weights}")
    progress(f"KV cache of {engine.capacity_tokens} tokens")
    _sign_fingerprint(engine, engine.arithmetic)
    return engine


def _sign_fingerprint(engine: PagedEngine, arithmetic: str) -> None:
    """Add the arithmetic to the model's fingerprint, so that no verifier with another one continues a session."""
    engine.info = replace(engine.info, fingerprint=combine(engine.info.fingerprint, arithmetic))


def _select(candidate: _Candidate) -> tuple[str, PagedEngine]:
    """Return the engine that runs, and its name."""
    options, progress = candidate.options, candidate.progress
    wanted = options.engine
    if wanted == "mock":
        raise StartupError("engine mock runs no model", field="engine", value=wanted, limit=", ".join(_MAKERS))
    if wanted != "transformers":
        name = wanted if wanted in _MAKERS else "native" if candidate.model.device.type == "cpu" else "cuda"
        try:
            return name, _MAKERS[name](candidate)
        except (UnsupportedModel, NoCompiler) as reason:
            if wanted != "auto":
                message = f"engine {wanted} cannot run {candidate.info.name}: {reason}"
                raise StartupError(message, field="engine", value=wanted, limit="auto or transformers here") from reason
            progress(f"engine {name} not usable, running through transformers, slower: {reason}")
            if any(hasattr(weight, "quantized") for weight in candidate.model.parameters()):
                raise  # it does not read blocks
    if options.quantization != "none":
        message = f"{options.quantization} needs engine native (int8) or vllm (others): not named, or not usable here"
        raise StartupError(message, field="quantization", value=options.quantization, limit="none here")
    return "transformers", _transformers_engine(candidate)


def _transformers_engine(candidate: _Candidate) -> TransformersEngine:
    model, info = candidate.model, candidate.info
    with startup_errors(info.name, info.architecture):
        engine = TransformersEngine(model, info, **candidate.cache)
        check_logits(model, engine)
    return engine


def _native_engine(candidate: _Candidate) -> NativeEngine:
    model, options, weights = candidate.model, candidate.options, candidate.weights
    if model.device.type != "cpu":
        raise UnsupportedModel(f"it runs on a CPU, the model is on {model.device}")
    if weights not in KINDS:
        raise UnsupportedModel(f"weights in {weights} on a CPU")
    with torch.inference_mode():
        spec = build_spec(model)
        candidate.progress("preparing kernels")
        exact, threads = options.dtype == "float32", options.threads
        engine = NativeEngine(spec, candidate.info, **candidate.cache, weights=weights, threads=threads, exact=exact)
        if candidate.passed:
            candidate.progress("start-up check skipped: passed before with these kernels on this processor")
        else:
            _check_spec(model, spec, engine, weights)
            _keep(candidate)
        auto = torch.bfloat16 if engine.reduced and not exact else torch.float32
        engine.use_cache(DTYPES.get(options.kv_dtype, auto))
    detach_rows(model, dequantize)
    _drop_weights(model, spec)
    return engine


def _cuda_engine(candidate: _Candidate) -> CudaGraphEngine:
    model = candidate.model
    if model.device.type != "cuda" or candidate.weights not in DTYPES:
        raise UnsupportedModel(f"weights in {candidate.weights} on {model.device.type}")
    with torch.inference_mode():
        spec = build_spec(model)
        engine = CudaGraphEngine(spec, candidate.info, **candidate.cache)
        try:
            _check_spec(model, spec, engine)
            engine.warm_up(candidate.progress)
        except (UnsupportedModel, torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of Triton: no compiler, no Python headers, too little shared memory
            raise UnsupportedModel(f"its kernels do not run here: {error_text(error)}") from error
    _drop_weights(model, spec)
    return engine


_MAKERS: dict[str, Callable[[_Candidate], PagedEngine]] = {
    "native": _native_engine,
    "cuda": _cuda_engine,
    "transformers": _transformers_engine,
}


def _check_spec(model: PreTrainedModel, spec: ModelSpec, engine: PagedEngine, weights: str | None = None) -> None:
    """Raise UnsupportedModel for a model spec that differs: a release of transformers may change a family."""
    try:
        check_windows(spec, _probe(model, engine.info).rules, engine.info.context_length)
        check_logits(model, engine, weights)
    except Differs as reason:
        raise UnsupportedModel(f"its model spec differs: {reason}") from reason


def _keep(candidate: _Candidate) -> None:
    """Record that a model passed."""
    try:
        if candidate.record:
            candidate.record.parent.mkdir(parents=True, exist_ok=True)
            candidate.record.touch()
    except OSError as error:
        candidate.progress(f"the next start repeats the start-up check, its result cannot be kept: {error}")


def _probe(model: PreTrainedModel, info: ModelInfo) -> TransformersEngine:
    """Return an engine with the smallest cache, after a step."""
    probe = TransformersEngine(model, info, kv_tokens=_RULE_TOKENS)
    probe.extend([SessionTokens("rules", [0] * _RULE_TOKENS)])
    return probe


def _fitting_tokens(model: PreTrainedModel, info: ModelInfo) -> int:
    """Return the capacity of a cache that takes most of a GPU's free memory."""
    if model.device.type == "cpu":
        return KV_TOKENS
    free, _ = torch.cuda.mem_get_info(model.device)
    return int(_GPU_CACHE_SHARE * max(free - _GPU_RESERVE, free / 2) / _probe(model, info).store.token_bytes)


def _drop_weights(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Free the model's weights: the engine has copies of all but the embeddings."""
    kept = {parameter.data_ptr() for parameter in model.get_input_embeddings().parameters()}
    if spec.rotations == ():  # position embeddings are read as well
        kept |= {parameter.data_ptr() for name, parameter in model.named_parameters() if "wpe" in name}
    for parameter in model.parameters():
        if parameter.data_ptr() not in kept:
            parameter.data = torch.empty(0)


@contextlib.contextmanager
def startup_errors(name: str, architecture: str = "") -> Iterator[None]:
    """Raise StartupError for any error inside: an unknown model can fail anywhere, in transformers or here."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        text = str(error)
        if not architecture:  # while it is loaded
            damaged = isinstance(error, SafetensorError | JSONDecodeError | FileNotFoundError)
            told = next((words for sign, words in _TOLD.items() if sign in text), _DAMAGED if damaged else "")
            problem = f"cannot load model {name!r}{told}"
        elif isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in text:
            problem = f"there is not enough memory for {name} and its KV cache, --kv-tokens"
        else:
            problem = f"{name} cannot be served, {architecture} is not a model that Outrider can run"
        message = f"{problem}: {error_text(error)}"
        raise StartupError(message, field="target", value=name, limit="see docs/targets.md") from error


def error_text(error: Exception) -> str:
    """Return an error's message on one line, with its type where the message alone is unclear."""
    text = shorten(" ".join(str(error).split()))
    return text if isinstance(error, (Differs, OutriderError, OSError)) else f"{type(error).__name__}: {text}"
