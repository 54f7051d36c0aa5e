"""Early exits by number of layers: acceptance and expected speed-up of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.models.hub import locate_safetensors
from outrider.models.pretrained import load_whole
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.errors import StartupError
from outrider.train import data
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.data import Dataset, Example, TrainingPrompt
from outrider.train.methods.interface import acceptance, accepted_lengths, collate, greedy_targets

_PLACES = 384


@dataclass(frozen=True, slots=True)
class Exit:
    """An early exit after `layers` layers, at its best γ."""

    layers: int
    acceptance: tuple[float, ...]
    gamma: int
    speed_up: float  # over plain decoding, on this machine alone, by the cost curve


def tune(
    target: str,
    prompts: Sequence[TrainingPrompt],
    data_home: Path,
    *,
    gamma_max: int,
    max_tokens: int,
    device: str,
    status: Callable[[str], None],
) -> list[Exit]:
    """Return the early exits of a target, by number of layers."""
    loaded = load_model(target, EngineOptions(device=device, prefix_tokens=0), status)
    cost = loaded.cost
    recipe = data.recipe(loaded, prompts, len(prompts), max_tokens, 0)
    status("generating text with the target")
    dataset = Dataset(data_home, replace(recipe, temperatures=(0.0,)), prompts)
    dataset.write(loaded)
    del loaded
    status("evaluating every layer")
    lengths = _lengths_by_layer(target, list(dataset.examples()), gamma_max, status)
    if not lengths:
        raise StartupError.of("target", target, "a model of several layers that answers")
    return [_exit(number, len(lengths), each, cost, gamma_max) for number, each in enumerate(lengths, 1)]


@torch.inference_mode()
def _lengths_by_layer(
    target: str, examples: Sequence[Example], gamma_max: int, status: Callable[[str], None]
) -> list[torch.Tensor]:
    """Return, per layer, the accepted length of each chain if the model ended there, and how many guesses fit."""
    model: Any = load_whole(target, locate_safetensors(target, status))
    norm = getattr(model.base_model, "norm", None)
    if norm is None:
        raise StartupError(f"{type(model).__name__} has no final norm where expected: no early exit", field="target")
    target_weights = EmbeddingsAndHead.of(model)
    found: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by layer
    for example in examples:
        if len(example.tokens) < example.prompt_length + 2:
            continue
        batch = collate([example], _PLACES, torch.device("cpu"))
        true = greedy_targets(target_weights, batch)
        ids = torch.cat([batch.first[:, None], batch.tokens], dim=1)
        states = model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        # The first entry is the embeddings, the last one the whole model.
        for layer, state in enumerate(states[1:-1]):
            guess = target_weights.logits(norm(state[:, 1:]), slice(None)).argmax(dim=-1)
            lengths = accepted_lengths([guess == true] * gamma_max, batch.written)
            found[layer].append(torch.cat([lengths, batch.room]))
    return [torch.cat(parts, dim=1) for parts in found.values()]


def _exit(layers: int, num_exits: int, lengths: torch.Tensor, cost: CostCurve, gamma_max: int) -> Exit:
    rates = tuple(acceptance(lengths, gamma_max)["acceptance"])
    plain = cost.at(1)
    draft = plain * layers / (num_exits + 1)  # the head's cost is ignored: it equals a layer or two
    best = max(range(1, gamma_max + 1), key=lambda gamma: _speed(rates[:gamma], cost, draft))
    return Exit(layers, rates, best, plain * _speed(rates[:best], cost, draft))


def _speed(rates: Sequence[float], cost: CostCurve, draft_ms: float) -> float:
    """Return tokens per millisecond with one guess per rate."""
    tokens = reached = 1.0
    for rate in rates:
        reached *= rate
        tokens += reached
    return tokens / (cost.at(1 + len(rates)) + len(rates) * draft_ms)
