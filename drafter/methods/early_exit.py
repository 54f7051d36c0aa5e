"""Early exit: the target's own first layers, alone or with trained layers after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from drafter.methods.model import ModelDrafter, read_vocabulary
from drafter.methods.registry import drafter
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.errors import StartupError
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts import card as cards

METHOD = "early-exit"


@drafter(METHOD)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> ModelDrafter:
    if not settings.model.isdecimal():
        return _trained(settings, progress)
    head_ids = read_vocabulary(settings.draft_vocabulary) if settings.draft_vocabulary else None
    options = replace(EngineOptions.of(settings), layers=int(settings.model), head_ids=head_ids)
    loaded = load_model(settings.target, options, progress)
    return ModelDrafter(loaded, settings.draft_candidates, head_ids)


def _trained(settings: DrafterSettings, progress: Callable[[str], None]) -> ModelDrafter:
    folder = cards.locate(settings.model, METHOD)
    card, weights = cards.load(folder, METHOD)
    with cards.reading(folder):
        ids = tuple(weights.pop("ids").tolist())
        layers = int(card.shape["exit_layers"] + card.shape["layers"])

    def load_weights(model: PreTrainedModel) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                parameters[name].copy_(weight)

    options = replace(EngineOptions.of(settings), layers=layers, head_ids=ids)
    try:
        loaded = load_model(settings.target, options, progress, change=load_weights)
    except (KeyError, RuntimeError) as error:
        message = f"drafter {folder} was trained for {card.target} and does not fit {settings.target}: {error}"
        raise StartupError(message, field="target", value=settings.target, limit=card.target) from error
    return ModelDrafter(loaded, settings.draft_candidates, ids, card.target_lineage)
