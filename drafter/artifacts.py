"""Weights of a trained drafter, and the target's matrices that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from outrider.engine.loading.options import pick_device
from outrider.protocol.fleet import ModelInfo
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts import card as cards
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_embeddings_and_head

M = TypeVar("M", bound=torch.nn.Module)
FromWeights = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor], EmbeddingsAndHead], M]


def read_trained(
    settings: DrafterSettings, method: str, from_weights: FromWeights[M], progress: Callable[[str], None]
) -> tuple[M, ModelInfo]:
    """Load a trained drafter; raise StartupError if it is damaged, of another kind or for another target."""
    folder = cards.locate(settings.model, method)
    card, weights = cards.load(folder, method)
    matrices = read_embeddings_and_head(settings.target, progress)
    card.check_target(folder, settings.target, matrices.digest)
    matrices = matrices.on(pick_device(settings.device, settings.engine))
    with cards.reading(folder):
        module = from_weights(card.shape, weights, matrices)
    return module.eval().to(matrices.head.device), card.info(folder, weights)
