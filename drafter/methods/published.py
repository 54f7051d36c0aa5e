"""Drafters in published formats, recognised by their files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from drafter.interface import Drafter
from drafter.methods.eagle import EagleDrafter
from drafter.methods.registry import drafter
from drafter.published.checkpoint_config import refused
from drafter.published.loading import PublishedCheckpoint, TargetSize
from drafter.published.module import PublishedModule
from drafter.published.row_engine import RowEngine
from outrider.base.openmp import release_threads
from outrider.engine.loading.options import EngineOptions, pick_dtype
from outrider.models.published_drafters import PUBLISHED
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts.embeddings_and_head import read_embeddings_and_head


@drafter(PUBLISHED)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> Drafter:
    checkpoint = _open(settings.model)
    checkpoint.check_target(TargetSize.read(settings.target, progress))
    if not checkpoint.module.needs.final_state:
        raise refused(checkpoint.folder, f"has the format {checkpoint.format.name}, which cannot be served yet")
    options = EngineOptions.of(settings)
    device = options.selected_device
    matrices = read_embeddings_and_head(settings.target, progress) if checkpoint.lacks else None
    progress(f"reading the {checkpoint.format.title}")
    module = checkpoint.load(matrices, pick_dtype(settings.dtype, device)).to(device)
    release_threads()
    engine = RowEngine(module, settings.kv_tokens)
    return EagleDrafter(engine, engine, _info(checkpoint, module), settings.draft_candidates)


def _open(name: str) -> PublishedCheckpoint:
    folder = Path(name).expanduser()
    if not name or not folder.is_dir():
        raise StartupError(
            f"kind {PUBLISHED} needs --model: there is no folder {name!r}; download the checkpoint and name its folder",
            field="model",
            value=name,
            limit="a folder",
        )
    return PublishedCheckpoint.open(folder)


def _info(checkpoint: PublishedCheckpoint, module: PublishedModule) -> ModelInfo:
    """Return the description that the drafter publishes. It fits every target of its width and vocabulary."""
    digest = hashlib.sha256(checkpoint.format.title.encode())
    for name, weight in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.double().sum():.6e}".encode())
    return ModelInfo(
        name=f"{checkpoint.format.name} {checkpoint.folder.name}",
        fingerprint=digest.hexdigest()[:32],
        architecture=checkpoint.format.name,
        parameters=sum(weight.numel() for weight in module.parameters()),
    )
