"""Finding, converting and loading models, and saying what they are.

A model is named by a local directory, a GGUF file, a hub id, or `default`
(see `outrider.models.hub`). Weights come from safetensors or GGUF only and no
code from a model repository is ever run.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from outrider.base.config import WorkerSettings
from outrider.base.openmp import let_go
from outrider.engine.checks.conformance import Differs, check_windows, examine, hold_against
from outrider.engine.checks.step_cost import measure_cost
from outrider.engine.cuda_graphs import CudaGraphEngine
from outrider.engine.interface import Engine, SessionTokens
from outrider.engine.model_spec import ModelSpec, UnsupportedModel, plan
from outrider.engine.native import NativeEngine, NoCompiler
from outrider.engine.paged import PagedEngine
from outrider.engine.rope import hold_rotations
from outrider.engine.tensor_parallel import RankGroup, TensorParallelEngine, whole
from outrider.engine.throttled import ThrottledEngine, parse_blur, parse_pace
from outrider.engine.transformers_engine import TransformersEngine
from outrider.models.hub import locate
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import ModelMismatch, OutriderError, StartupError, shorten
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.vocabulary import Vocabulary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Stages are reported by our own `progress`; bars would only fill the logs.
disable_progress_bar()

_SAMPLED_WEIGHTS = 64
_WARM_UP_TOKENS = 8
_NATIVE_WEIGHTS = ("float32", "bfloat16", "int8")
_RULE_TOKENS = 2
_ANY = 1 << 20  # tokens of context where neither the model nor its tokenizer names a length
_CPU_IDLE_SHARE = 8  # of a CPU's cache, one part in this many may hold what nobody uses now


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is to be run. `compile`: auto takes the fast engine where it works, on insists, off does without."""

    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    compile: str = "auto"
    threads: int = 0
    kv_tokens: int = 65_536
    prefix_tokens: int | None = None  # kept of ended sessions; None: what suits the device
    head_ids: tuple[int, ...] | None = None  # the only ids that logits are wanted of, in this order; None: all
    layers: int | None = None  # only the first so many
    pace: str = ""  # no step is faster; see paced.py
    blur: str = ""  # of what is paced

    @classmethod
    def of(cls, settings: WorkerSettings) -> EngineOptions:
        return cls(
            device=settings.device,
            dtype=settings.dtype,
            quantization=settings.quantization,
            compile=settings.compile,
            threads=settings.threads,
            kv_tokens=settings.kv_tokens,
            prefix_tokens=None if settings.prefix_tokens < 0 else settings.prefix_tokens,
            pace=settings.pace,
            blur=settings.blur,
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    cost: CostCurve


def load_model(
    name: str,
    options: EngineOptions | None = None,
    progress: Callable[[str], None] = lambda _: None,
    team: RankGroup | None = None,
    change: Callable[[PreTrainedModel], None] = lambda _: None,
) -> LoadedModel:
    """Load a model, or a rank's share of it, and prove with real steps that it runs. `change` may give it other weights
    first.

    Raises StartupError with what to do about it.
    """
    options = options or EngineOptions()
    if options.blur and not options.pace:
        raise StartupError("blur is for paced engines", field="blur", value=options.blur, limit="needs pace")
    place = pick_device(options.device) if team is None else team.device
    dtype = pick_dtype(options.dtype, place)
    with contextlib.nullcontext() if team is None else team.rank_0_first():
        path = locate(name, progress)
        source = _source(path)
        if team is not None:
            team.check_model(name, source)
    progress(f"loading {name}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source,
            **_cut(source, options.layers),
            dtype=dtype,
            attn_implementation="eager",  # `make_engine` changes it
            use_safetensors=True,
            **({} if team is None else team.sharding()),
        )
        vocabulary = Vocabulary.of(tokenizer)
    except Exception as error:  # what a strange model breaks in transformers can be anything
        raise StartupError(
            f"cannot load model {name!r}: {_cause(error)}",
            field="target",
            value=name,
            limit="a model with safetensors or GGUF",
        ) from error
    change(model)
    model = model.to(place).eval()
    with refused_in_words(name, type(model).__name__):
        info = describe(Path(path).name, model, tokenizer, vocabulary, options.quantization)
    if options.head_ids is not None:
        info = replace(info, fingerprint=reduce_head(model, options.head_ids, info.fingerprint))
    if options.pace:
        info = replace(info, name=f"{info.name} (paced {options.pace})", device="paced")
    engine = make_engine(model, info, options, progress, team)
    if team is not None and not team.leads:
        return LoadedModel(engine, tokenizer, vocabulary, UNKNOWN_COST)  # rank 0 has all of them warm up and measures
    progress("warming up")
    warm_up(engine)
    # What is there now stays: looking through it again and again would delay steps.
    gc.collect()
    gc.freeze()
    if options.pace:
        engine = ThrottledEngine(engine, parse_pace(options.pace), parse_blur(options.blur))
    progress("measuring what steps cost")
    cost = measure_cost(engine)
    let_go()  # another thread may run the model
    return LoadedModel(engine, tokenizer, vocabulary, cost)


def _cut(source: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The configuration of a model that ends after so many layers, where that is wanted."""
    if layers is None:
        return {}
    config = AutoConfig.from_pretrained(**source)
    text = config.get_text_config()
    if not 1 <= layers <= text.num_hidden_layers:
        raise ValueError(f"it has {text.num_hidden_layers} layers, not {layers}")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return {"config": config}


def reduce_head(model: PreTrainedModel, ids: tuple[int, ...], fingerprint: str) -> str:
    """Keep only these rows of the output embeddings; the fingerprint of what that makes of the model.

    The input embeddings stay whole, also where both are the same tensor.
    """
    head = model.get_output_embeddings()
    if not ids or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < head.weight.shape[0]:
        raise StartupError(
            "the draft vocabulary does not fit the model",
            field="draft_vocabulary",
            value=f"{len(ids)} ids, {min(ids, default=0)} to {max(ids, default=0)}",
            limit=f"ids in [0, {head.weight.shape[0] - 1}], each once",
        )
    chosen = torch.tensor(ids, device=head.weight.device)
    smaller = torch.nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    smaller.weight = torch.nn.Parameter(head.weight.detach()[chosen], requires_grad=False)
    if head.bias is not None:
        smaller.bias = torch.nn.Parameter(head.bias.detach()[chosen], requires_grad=False)
    model.set_output_embeddings(smaller)
    return hashlib.sha256(f"{fingerprint} {ids}".encode()).hexdigest()[:32]


def make_engine(
    model: PreTrainedModel,
    info: ModelInfo,
    options: EngineOptions,
    progress: Callable[[str], None],
    team: RankGroup | None = None,
) -> Engine:
    """The fastest engine that answers what the model answers. Raises StartupError where none does."""
    idle = options.prefix_tokens
    if idle is None and model.device.type == "cpu":
        idle = options.kv_tokens // _CPU_IDLE_SHARE
    with refused_in_words(info.name, info.architecture):
        context = hold_rotations(model, info.context_length)
        examine(model, context)
    if context < info.context_length:
        progress(
            f"context limited to {context} of {info.context_length} tokens: past it all positions turn differently"
        )
        info = replace(info, context_length=context)
    if team is not None:
        share = _transformers_engine(model, info, options, idle).signed(team.size)
        return TensorParallelEngine(share, team) if team.leads else share
    if options.compile != "off":
        make = _native_engine if model.device.type == "cpu" else _graph_engine
        try:
            return make(model, info, options, idle, progress).signed()
        except (UnsupportedModel, NoCompiler) as reason:
            if options.compile == "on":
                raise StartupError(
                    f"no fast engine: {reason}", field="compile", value="on", limit="auto or off here"
                ) from reason
            progress(f"running through transformers, slower: {reason}")
    if options.quantization != "none":
        raise StartupError(
            f"{options.quantization} needs the fast CPU engine, which this model, device or machine does not have",
            field="quantization",
            value=options.quantization,
            limit="none here",
        )
    return _transformers_engine(model, info, options, idle).signed()


@contextlib.contextmanager
def refused_in_words(name: str, architecture: str) -> Iterator[None]:
    """What an unknown model breaks, in transformers or here, can be anything: the operator is told in a sentence."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(
            f"{name} cannot be served, {architecture} is not a model that Outrider can run: {_cause(error)}",
            field="target",
            value=name,
            limit="see docs/targets.md",
        ) from error


def _cause(error: Exception) -> str:
    said = shorten(" ".join(str(error).split()))
    return said if isinstance(error, (Differs, OutriderError, OSError)) else f"{type(error).__name__}: {said}"


def _transformers_engine(
    model: PreTrainedModel, info: ModelInfo, options: EngineOptions, evictable_tokens: int | None
) -> TransformersEngine:
    with refused_in_words(info.name, info.architecture):
        engine = TransformersEngine(model, info, kv_tokens=options.kv_tokens, evictable_tokens=evictable_tokens)
        hold_against(model, engine)
    return engine


def _native_engine(
    model: PreTrainedModel,
    info: ModelInfo,
    options: EngineOptions,
    evictable_tokens: int | None,
    progress: Callable[[str], None],
) -> NativeEngine:
    weights = options.quantization if options.quantization != "none" else str(model.dtype).removeprefix("torch.")
    if weights not in _NATIVE_WEIGHTS:
        raise UnsupportedModel(f"weights in {weights} on a CPU")
    with torch.inference_mode():
        built = plan(model)
        progress("preparing kernels")
        engine = NativeEngine(
            built,
            info,
            kv_tokens=options.kv_tokens,
            evictable_tokens=evictable_tokens,
            weights=weights,
            threads=options.threads,
        )
        _hold_against(model, built, engine, weights)
    _let_go(model, built)
    return engine


def _graph_engine(
    model: PreTrainedModel,
    info: ModelInfo,
    options: EngineOptions,
    evictable_tokens: int | None,
    progress: Callable[[str], None],
) -> CudaGraphEngine:
    weights = str(model.dtype).removeprefix("torch.")
    if model.device.type != "cuda" or options.quantization != "none" or weights not in DTYPES:
        named = options.quantization if options.quantization != "none" else weights
        raise UnsupportedModel(f"weights in {named} on {model.device.type}")
    with torch.inference_mode():
        built = plan(model)
        engine = CudaGraphEngine(built, info, kv_tokens=options.kv_tokens, evictable_tokens=evictable_tokens)
        _hold_against(model, built, engine)
    _let_go(model, built)
    engine.warm_up(progress)
    return engine


def _hold_against(model: PreTrainedModel, built: ModelSpec, engine: PagedEngine, weights: str | None = None) -> None:
    """A family may change in a release of transformers: then its plan must not be trusted."""
    probe = TransformersEngine(model, engine.info, kv_tokens=_RULE_TOKENS)
    probe.extend([SessionTokens("rules", [0] * _RULE_TOKENS)])
    try:
        check_windows(built, probe.rules, engine.info.context_length)
        hold_against(model, engine, weights)
    except Differs as reason:
        raise UnsupportedModel(f"its plan differs: {reason}") from reason


def _let_go(model: PreTrainedModel, built: ModelSpec) -> None:
    """The engine has its own copy of the weights; only the embeddings are still read."""
    kept = {parameter.data_ptr() for parameter in model.get_input_embeddings().parameters()}
    if built.rotations == ():  # positions are embedded too
        kept |= {parameter.data_ptr() for name, parameter in model.named_parameters() if "wpe" in name}
    for parameter in model.parameters():
        if parameter.data_ptr() not in kept:
            parameter.data = torch.empty(0)


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


def warm_up(engine: Engine) -> None:
    """Run a step, a guess block and a rollback: a worker serves only when this works."""
    session = "warm-up"
    length = min(_WARM_UP_TOKENS, engine.info.context_length - 2)
    engine.extend([SessionTokens(session, [0] * length)])
    logits = engine.extend([SessionTokens(session, [0, 0], (-1, -1))]).logits[0]
    engine.compact(session, length, [1])
    engine.free(session)
    if not bool(torch.isfinite(logits.float()).all()):
        raise ModelMismatch(
            "the model answers NaN or infinity; try another dtype", field="dtype", value=engine.info.dtype
        )


def describe(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    quantization: str = "none",
) -> ModelInfo:
    config = model.config.get_text_config()
    parameter = next(model.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.") if quantization == "none" else quantization
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(model, vocabulary, quantization),
        weights_digest=weights_digest(model, vocabulary),
        architecture=type(model).__name__,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        vocabulary_digest=vocabulary.digest,
        context_length=int(getattr(config, "max_position_embeddings", None) or min(tokenizer.model_max_length, _ANY)),
        eos_token_ids=_end_tokens(model, tokenizer),
        dtype=dtype,
        device=str(parameter.device),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def fingerprint(model: PreTrainedModel, vocabulary: Vocabulary, quantization: str = "none") -> str:
    """A digest that differs when the text could: architecture, number format, vocabulary, samples of the weights."""
    digest = hashlib.sha256()
    digest.update(f"{type(model).__name__} {vocabulary.digest}".encode())
    if quantization != "none":
        digest.update(quantization.encode())
    for name, weight in model.state_dict().items():
        flat = whole(weight.detach()).reshape(-1)
        stride = max(1, flat.numel() // _SAMPLED_WEIGHTS)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(flat[::stride].cpu().to(torch.float64).numpy().tobytes())
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    for changing in ("transformers_version", "dtype", "torch_dtype", "distributed_config"):
        config.pop(changing, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def weights_digest(model: PreTrainedModel, vocabulary: Vocabulary) -> str:
    """A digest of the same weights in whatever number format they run: what a drafter was trained for."""
    digest = hashlib.sha256(f"{type(model).__name__} {vocabulary.digest}".encode())
    for name, weight in model.state_dict().items():
        flat = whole(weight.detach()).reshape(-1)
        stride = max(1, flat.numel() // _SAMPLED_WEIGHTS)
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(flat[::stride].cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """As transformers' generate ends: the generation config's ids, else the configuration's, and the tokenizer's."""
    ends: set[int] = set()
    generation: Any = getattr(model, "generation_config", None)
    config: Any = model.config  # a model of several parts may name its ends only in that of the text
    named = (getattr(each, "eos_token_id", None) for each in (generation, config, config.get_text_config(), tokenizer))
    for source in named:
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
