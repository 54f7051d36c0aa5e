"""Loading a model: locate its files, load them, select an engine, and run real steps before it serves.

A model is named by a local directory, a GGUF file, a hub id, or `default` (see `outrider.models.hub`). Weights come
from safetensors or GGUF only. No code from a model repository is ever run.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.openmp import release_threads
from outrider.engine.checks.step_cost import measure_cost
from outrider.engine.interface import Engine, SessionTokens
from outrider.engine.loading.identity import describe
from outrider.engine.loading.options import EngineOptions, pick_device, pick_dtype
from outrider.engine.loading.selection import make_engine, startup_errors
from outrider.engine.model_spec import UnsupportedModel
from outrider.engine.native import NoCompiler, dequantize
from outrider.engine.tensor_parallel import RankGroup
from outrider.engine.throttled import ThrottledEngine, parse_blur, parse_pace
from outrider.models.hub import locate, locate_safetensors
from outrider.models.in_place import load_in_place, quantized_rows
from outrider.models.pretrained import dequantized, load_whole
from outrider.models.tokenizer import read_tokenizer
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import ModelMismatch, StartupError
from outrider.protocol.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine that has run, with its tokenizer, vocabulary and cost curve."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    cost: CostCurve


def load_model(
    name: str,
    options: EngineOptions | None = None,
    progress: Callable[[str], None] = lambda _: None,
    rank_group: RankGroup | None = None,
    change: Callable[[PreTrainedModel], None] | None = None,
) -> LoadedModel:
    """Load a model, or a rank's share, after `change` of its weights, and run real steps; raise StartupError."""
    options = options or EngineOptions()
    if options.blur and not options.pace:
        raise StartupError("blur needs a pace", field="blur", value=options.blur, limit="needs pace")
    device = pick_device(options.device, options.engine) if rank_group is None else rank_group.device
    dtype = pick_dtype(options.dtype, device)
    with contextlib.nullcontext() if rank_group is None else rank_group.rank_0_first():
        path = (locate if rank_group is None else locate_safetensors)(name, progress)
        if rank_group is not None:
            rank_group.check_model(name, path)
    progress(f"loading {name}")
    with startup_errors(name):
        config = _first_layers(path, options.layers, device)
        tokenizer = read_tokenizer(path)
        in_place = dtype == torch.float32 or (dtype == torch.bfloat16 and options.quantization == "none")
        native = options.engine in ("auto", "native") and device.type == "cpu" and not (change or rank_group)
        model = load_in_place(path, dequantize, config, dtype) if native and in_place else None
        if model is None:
            loading = {} if rank_group is None else rank_group.sharding()
            loading |= {"config": config, "dtype": dtype, "attn_implementation": "eager"}  # `make_engine` changes it
            model = load_whole(name, locate_safetensors(name, progress), **loading)
        vocabulary = Vocabulary.of(tokenizer)
    if change is not None:
        change(model)
    with startup_errors(name, type(model).__name__):
        model = model.to(device).eval()
        called = Path(name).stem if name.endswith(".gguf") else Path(path).name
        info = describe(called, model, tokenizer, vocabulary, options.quantization)
    if options.head_ids is not None:
        info = replace(info, fingerprint=reduce_head(model, options.head_ids, info.fingerprint))
    if options.pace:
        info = replace(info, name=f"{info.name} (paced {options.pace})", device="paced")
    try:
        engine = make_engine(model, info, options, progress, rank_group)
    except (UnsupportedModel, NoCompiler):  # weights that stay in their file, which the kernels alone read
        return load_model(name, replace(options, engine="transformers"), progress)
    if rank_group is not None and not rank_group.is_leader:
        return LoadedModel(engine, tokenizer, vocabulary, UNKNOWN_COST)  # rank 0 runs warm-up and measurement on all
    progress("warming up")
    warm_up(engine)
    # The model stays: collections that scan it again would delay steps.
    gc.collect()
    gc.freeze()
    if options.pace:
        engine = ThrottledEngine(engine, parse_pace(options.pace), parse_blur(options.blur))
    progress("measuring step times")
    cost = measure_cost(engine)
    release_threads()  # another thread may run the model
    return LoadedModel(engine, tokenizer, vocabulary, cost)


def _first_layers(path: Path | str, layers: int | None, device: torch.device) -> Any:
    """Return the configuration of a model that ends after `layers` layers; None: all of them."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    config = dequantized(config) if device.type == "cpu" else config
    text = config.get_text_config()
    if layers is None:
        return config
    if not 1 <= layers <= text.num_hidden_layers:
        raise ValueError(f"it has {text.num_hidden_layers} layers, not {layers}")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def reduce_head(model: PreTrainedModel, ids: tuple[int, ...], fingerprint: str) -> str:
    """Keep these rows of the output embeddings, not of the input ones, and return the fingerprint of the result."""
    head = model.get_output_embeddings()
    if not ids or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < head.weight.shape[0]:
        given = f"{len(ids)} ids, {min(ids, default=0)} to {max(ids, default=0)}"
        raise StartupError.of("draft_vocabulary", given, f"ids in [0, {head.weight.shape[0] - 1}], each once")
    chosen = torch.tensor(ids, device=head.weight.device)
    smaller = torch.nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    rows = quantized_rows(head)
    weight = rows.dequantize(chosen).to(head.weight.dtype) if rows else head.weight.detach()[chosen]
    smaller.weight = torch.nn.Parameter(weight, requires_grad=False)
    if head.bias is not None:
        smaller.bias = torch.nn.Parameter(head.bias.detach()[chosen], requires_grad=False)
    model.set_output_embeddings(smaller)
    return hashlib.sha256(f"{fingerprint} {ids}".encode()).hexdigest()[:32]


def warm_up(engine: Engine) -> None:
    """Run a step, a tree of guesses and a rollback: a worker serves only if these work."""
    session = "warm-up"
    length = min(8, engine.info.context_length - 2)
    engine.extend([SessionTokens(session, [0] * length)])
    logits = engine.extend([SessionTokens(session, [0, 0], (-1, -1))]).logits[0]
    engine.compact(session, length, [1])
    engine.free(session)
    if not bool(torch.isfinite(logits.float()).all()):
        message = "the model answers NaN or infinity; try another dtype"
        raise ModelMismatch(message, field="dtype", value=engine.info.dtype)
