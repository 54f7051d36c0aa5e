"""Drafters in published formats, recognised by their files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from drafter.interface import DraftRequest
from drafter.methods.eagle import EagleDrafter
from drafter.methods.published_blocks import BlockDrafter
from drafter.methods.registry import drafter
from drafter.published.dflash import PublishedDflash
from drafter.published.eagle3 import PublishedPeagle
from drafter.published.loading import PublishedCheckpoint, TargetSize
from drafter.published.module import PublishedModule
from drafter.published.row_engine import RowEngine
from outrider.engine.loading.options import pick_device, pick_dtype
from outrider.hidden_states.projection import PackedProjection
from outrider.models.published_drafters import PUBLISHED, drafter_folder
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.speculation import Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts.embeddings_and_head import read_embeddings_and_head

log = structlog.get_logger(__name__)


class PublishedDrafter:
    """Drafter that reads no other hidden states than those that its checkpoint was trained on."""

    needs_hidden_states = True
    reads_context = True

    def __init__(
        self, rows: EagleDrafter | BlockDrafter, width: int, projection: PackedProjection | None, target_width: int
    ) -> None:
        self.info, self.vocab_limit = rows.info, rows.vocab_limit
        self.vocabulary: Vocabulary | None = None  # it fits every target of its width and vocabulary size
        self._rows = rows
        self.target_width = target_width  # of hidden states, before the projection
        self.projection = projection  # None: it reads final states
        self._width = width
        self._told = False

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        readable = [replace(it, hidden_states=tuple(filter(self._is_readable, it.hidden_states))) for it in requests]
        return self._rows.draft(readable)

    def forget(self, session: str) -> None:
        self._rows.forget(session)

    def _is_readable(self, states: HiddenStates) -> bool:
        # Final states have number 0 as float16.
        own = (states.number > 0) == (self.projection is not None or states.float8)
        readable = own and states.width == self._width and states.count > 0
        if not readable and not self._told:
            log.warning("hidden states not usable, not drafting from them", width=states.width, needed=self._width)
            self._told = True
        return readable


@drafter(PUBLISHED)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> PublishedDrafter:
    checkpoint = _open(settings.model)
    target = TargetSize.read(settings.target, progress)
    checkpoint.check_target(target)
    device = pick_device(settings.device, settings.engine)
    matrices = read_embeddings_and_head(settings.target, progress) if checkpoint.lacks else None
    progress(f"reading the {checkpoint.format.title}")
    module = checkpoint.load(matrices, pick_dtype(settings.dtype, device)).to(device)
    module.ids = module.ids.to(device)
    info, candidates = _info(checkpoint, module), settings.draft_candidates
    rows: EagleDrafter | BlockDrafter
    if isinstance(module, (PublishedPeagle, PublishedDflash)):
        rows = BlockDrafter(module, settings.kv_tokens, info, candidates)
    else:
        engine = RowEngine(module, settings.kv_tokens)
        rows = EagleDrafter(engine, engine, info, candidates)
    return PublishedDrafter(rows, module.shape.hidden, checkpoint.projection(target), module.needs.hidden)


def _open(name: str) -> PublishedCheckpoint:
    folder = drafter_folder(name)
    if not name or not folder.is_dir():
        message = f"kind {PUBLISHED} needs --model: there is no folder {name!r}"
        raise StartupError(message, field="model", value=name, limit="a folder or a hub id")
    return PublishedCheckpoint.open(folder)


def _info(checkpoint: PublishedCheckpoint, module: PublishedModule) -> ModelInfo:
    """Return the description that the drafter publishes."""
    digest = hashlib.sha256(checkpoint.format.title.encode())
    for name, weight in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.double().sum():.6e}".encode())
    return ModelInfo(
        name=f"{checkpoint.format.name} {checkpoint.folder.name}",
        fingerprint=digest.hexdigest()[:32],
        architecture=checkpoint.format.name,
        vocab_size=module.needs.vocab,
        parameters=sum(weight.numel() for weight in module.parameters()),
    )
