"""Weights of a trained drafter, and the target's matrices that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from outrider.engine.loading.options import EngineOptions
from outrider.protocol.fleet import ModelInfo
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts import card as cards
from outrider.train.artifacts.card import Card
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_embeddings_and_head


@dataclass(frozen=True, slots=True)
class TrainedArtifacts:
    card: Card
    weights: Mapping[str, torch.Tensor]
    embeddings_and_head: EmbeddingsAndHead  # the target's, on the drafter's device
    info: ModelInfo


def read_trained(settings: DrafterSettings, method: str, progress: Callable[[str], None]) -> TrainedArtifacts:
    """Load a trained drafter; raise StartupError if it is damaged, of another kind or for another target."""
    folder = cards.locate(settings.model, method)
    card, weights = cards.load(folder, method)
    matrices = read_embeddings_and_head(settings.target, progress)
    card.check_target(folder, settings.target, matrices.digest)
    device = EngineOptions.of(settings).selected_device
    return TrainedArtifacts(card, weights, matrices.on(device), card.info(folder, weights))
