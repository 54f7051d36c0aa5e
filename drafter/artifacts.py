"""A trained drafter's folder, and the parts of the target that it goes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from drafter.settings import DrafterSettings
from outrider.engine.loading.loader import pick_device
from outrider.protocol.fleet import ModelInfo
from outrider.train.artifacts import card as cards
from outrider.train.artifacts.card import Card
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_ends


@dataclass(frozen=True, slots=True)
class TrainedArtifacts:
    card: Card
    weights: Mapping[str, torch.Tensor]
    ends: EmbeddingsAndHead  # of its target, on the drafter's device
    info: ModelInfo


def read_trained(settings: DrafterSettings, method: str, progress: Callable[[str], None]) -> TrainedArtifacts:
    """Raises StartupError for what is damaged, of another kind or made for another target."""
    folder = cards.locate(settings.model, method)
    card, weights = cards.load(folder, method)
    ends = read_ends(settings.target, progress)
    card.check_target(folder, settings.target, ends.digest)
    return TrainedArtifacts(card, weights, ends.on(pick_device(settings.device)), card.info(folder, weights))
