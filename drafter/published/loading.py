"""Reading a checkpoint: recognise it, compare it with its target, and fill its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from drafter.published.checkpoint_config import CheckpointConfig, refused
from drafter.published.module import EMBEDDINGS, HEAD, PublishedModule
from drafter.published.recognition import RecognisedFormat, recognise
from drafter.published.weight_files import WeightEntry, read_finite, weight_entries
from outrider.hidden_states.projection import PackedProjection
from outrider.models.hub import locate
from outrider.protocol.checks import MAX_IDS
from outrider.protocol.errors import ModelMismatch, StartupError
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead

_IDS = "d2t"  # offset of each drafted id's target id
_EXACT = ".e_score_correction_bias"  # much larger than what decides between experts: float32 in any case
_PROJECTION = ("fc", "input_norm", "fc_norm", "hidden_norm")  # modules before the first layer


@dataclass(frozen=True, slots=True)
class TargetSize:
    """The dimensions of a target that drafters depend on."""

    name: str
    hidden: int
    vocab: int
    layers: int

    @classmethod
    def read(cls, name: str, progress: Callable[[str], None]) -> TargetSize:
        """Return the dimensions in a target's configuration. Its weights are not read."""
        path = locate(name, progress)
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
            return cls(name, config.hidden_size, config.vocab_size, config.num_hidden_layers)
        except Exception as error:
            if isinstance(path, Path):  # a model that transformers does not know
                plain = CheckpointConfig.read(path)
                hidden, layers = plain.integer("hidden_size"), plain.integer("num_hidden_layers")
                return cls(name, hidden, plain.integer("vocab_size", at_most=MAX_IDS), layers)
            raise StartupError(f"cannot read the config of {name!r}: {error}", field="target", value=name) from error


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A recognised checkpoint whose tensors have the names and shapes of its module; no weight has been read."""

    folder: Path
    format: RecognisedFormat
    module: PublishedModule
    entries: Mapping[str, WeightEntry]  # by parameter
    ids: WeightEntry | None

    @classmethod
    def open(cls, folder: Path) -> PublishedCheckpoint:
        """Read the configuration and the shapes. Raise StartupError with the first thing that is wrong."""
        config = CheckpointConfig.read(folder)
        found = weight_entries(folder)
        recognised = recognise(config, found.keys())
        module = recognised.make(recognised.config, found.keys())
        named = {module.published_name(name): entry for name, entry in found.items()}
        entries = {name: entry for name, entry in named.items() if name is not None}
        ids = entries.pop(_IDS, None)
        checkpoint = cls(folder, recognised, module, entries, ids)
        checkpoint._check_shapes()
        return checkpoint

    @property
    def lacks(self) -> tuple[str, ...]:
        """Return the tensors that the target must supply."""
        return tuple(sorted(self.module.optional - self.entries.keys()))

    def _check_shapes(self) -> None:
        wanted = {name: tuple(weight.shape) for name, weight in self.module.state_dict().items()}
        for name, entry in self.entries.items():
            if name not in wanted:
                raise refused(self.folder, f"has {name}, which the format {self.format.name} does not have")
            if entry.shape != wanted[name]:
                raise refused(self.folder, f"has {name} of shape {entry.shape}, not {wanted[name]}", str(wanted[name]))
        missing = sorted(wanted.keys() - self.entries.keys() - self.module.optional)
        if missing:
            raise refused(self.folder, f"has no {missing[0]}")
        self._check_ids()

    def _check_ids(self) -> None:
        draft, vocab = self.module.draft_vocab, self.module.needs.vocab
        if self.ids is None and draft != vocab:
            raise refused(self.folder, f"has no {_IDS}, and drafts {draft} of {vocab} ids")
        if self.ids is not None and (self.ids.shape != (draft,) or self.ids.dtype.is_floating_point):
            raise refused(self.folder, f"has {_IDS} of shape {self.ids.shape}, not ({draft},) whole numbers")
        if draft != vocab and HEAD in self.lacks:
            raise refused(self.folder, f"has no {HEAD}, and drafts {draft} of {vocab} ids")

    def check_target(self, target: TargetSize) -> None:
        """Raise ModelMismatch with the first thing that differs from what the drafter was made for."""
        needs = self.module.needs
        self._compare(target, "hidden size", target.hidden, needs.hidden)
        self._compare(target, "vocabulary size", target.vocab, needs.vocab)
        if needs.num_layers is not None:
            self._compare(target, "number of layers", target.layers, needs.num_layers)
        layers = needs.layers_of(target.layers)
        if layers and not 1 <= min(layers) <= max(layers) <= target.layers:
            raise self._mismatch(target, f"number of layers {target.layers}", f"states after the layers {layers}")
        if self.lacks and (width := self.module.shape.hidden) != target.hidden:
            raise self._mismatch(target, f"width {target.hidden}", f"{self.lacks[0]} of width {width}")

    def _compare(self, target: TargetSize, what: str, found: int, needed: int) -> None:
        if found != needed:
            raise self._mismatch(target, f"{what} {found}", str(needed))

    def _mismatch(self, target: TargetSize, found: str, needed: str) -> ModelMismatch:
        return ModelMismatch(
            f"the drafter in {self.folder} does not fit {target.name}: it needs {needed}, the target has {found}",
            field="target",
            value=target.name,
            limit=needed,
        )

    def check_weights(self) -> int:
        """Read every weight once, and return the number of parameters. Raise StartupError if one is not finite."""
        for name, entry in self.entries.items():
            read_finite(self.folder, name, entry)
        self._target_ids()
        return sum(torch.Size(entry.shape).numel() for entry in self.entries.values())

    def projection(self, target: TargetSize) -> PackedProjection | None:
        """Return what the verifier projects a token's states with; None for a drafter on final states."""
        layers = self.module.needs.layers_of(target.layers)
        if not layers:
            return None
        names = [name for name in self.entries if name.partition(".")[0] in _PROJECTION]
        weights = {name: read_finite(self.folder, name, self.entries[name]) for name in names}
        return PackedProjection(weights, self.module.shape.eps, layers)

    def load(self, target: EmbeddingsAndHead | None = None, dtype: torch.dtype = torch.float32) -> PublishedModule:
        """Fill the module, with the target's embeddings and head where the checkpoint has none."""
        weights = {
            name: read_finite(self.folder, name, entry, torch.float32 if name.endswith(_EXACT) else dtype)
            for name, entry in self.entries.items()
        }
        for name in self.lacks:
            if target is None or (name == HEAD and (target.head_bias is not None or target.softcap)):
                raise refused(self.folder, f"has no {name}, and the target has no plain one")
            weights[name] = (target.embeddings if name == EMBEDDINGS else target.head).to(dtype)
        self.module.ids, order = self._target_ids().sort()
        if not bool((order.diff() > 0).all()):  # sampling needs columns in the order of their ids
            weights |= {name: weights[name][order] for name in self.module.by_column}
        self.module.load_state_dict(weights, assign=True)
        return self.module.requires_grad_(requires_grad=False).eval()

    def _target_ids(self) -> torch.Tensor:
        ids = torch.arange(self.module.draft_vocab)
        if self.ids is None:
            return ids
        ids = ids + self.ids.read().long()
        vocab = self.module.needs.vocab
        if not bool((ids >= 0).all() & (ids < vocab).all()) or len(set(ids.tolist())) < len(ids):
            raise refused(self.folder, f"has a {_IDS} that names ids twice or beyond {vocab}", "offsets to target ids")
        return ids
