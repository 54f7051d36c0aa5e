"""The folder of a trained drafter: card.json describes it and names its target, weights.safetensors has its weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.base.atomic_files import atomic_write
from outrider.models.drafter_choice import CARD
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo

WEIGHTS = "weights.safetensors"
_FORMAT = 1
_MADE = "a folder made by `outrider train`"


@dataclass(frozen=True, slots=True)
class Card:
    """The content of card.json; field names are the file's."""

    method: str
    target: str  # its name
    target_lineage: str  # its weights digest
    vocabulary_digest: str
    ends_digest: str  # of its embeddings and head
    shape: dict[str, Any]  # of the drafter's module
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    format: int = _FORMAT

    def check_target(self, folder: Path, target: str, ends_digest: str) -> None:
        """Raise StartupError for a target other than the drafter's."""
        if ends_digest != self.ends_digest:
            message = f"the drafter in {folder} was trained for {self.target}, not for {target}; use `outrider train`"
            raise StartupError(message, field="target", value=target, limit=self.target)

    def info(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> ModelInfo:
        """Return the description that the drafter publishes."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for name, weight in sorted(weights.items()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.double().sum():.6e}".encode())
        return ModelInfo(
            name=f"{self.method} {folder.name}",
            fingerprint=digest.hexdigest()[:32],
            architecture=self.method,
            parameters=sum(weight.numel() for weight in weights.values()),
            target_digest=self.target_lineage,
        )


def save(folder: Path, card: Card, weights: Mapping[str, torch.Tensor], name: str = WEIGHTS) -> None:
    """Save a trained drafter; each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / name) as file:
        save_file({key: weight.contiguous() for key, weight in weights.items()}, file, {"format": "pt"})
    for file in folder.glob("*.safetensors"):  # of a model beside it, too: services may run as other users
        file.chmod(0o644)
    with atomic_write(folder / CARD) as file:
        file.write_text(json.dumps(asdict(card), indent=2) + "\n")


def locate(name: str, method: str) -> Path:
    """Return the folder of a trained drafter; `default` and the empty name select the bundled one."""
    if name not in ("", "default"):
        return Path(os.path.expanduser(name))
    folders = (path.parent for path in sorted(Path(str(files("outrider.bundled"))).glob(f"*/{CARD}")))
    folder = next((each for each in folders if read_card(each).method == method), None)
    if folder is None:
        message = f"kind {method} needs --model: no drafter of that kind comes with Outrider"
        raise StartupError(message, field="model", value=name, limit=_MADE)
    return folder


def is_trained(name: str) -> bool:
    """Return whether a folder holds a trained drafter."""
    return Path(os.path.expanduser(name), CARD).is_file()


def load(folder: Path, method: str) -> tuple[Card, dict[str, torch.Tensor]]:
    """Load a trained drafter of a method. Raises StartupError with the reason if that fails."""
    card = read_card(folder)
    if card.method != method:
        raise StartupError.of("kind", method, card.method, f", the kind of the drafter in {folder}")
    with reading(folder):
        return card, load_file(folder / WEIGHTS)


def read_card(folder: Path) -> Card:
    """Read the card of a trained drafter. Raises StartupError if it is missing, damaged or of another format."""
    if not (folder / CARD).is_file():
        message = f"{folder} holds no trained drafter: no {CARD}"
        raise StartupError(message, field="model", value=str(folder), limit=_MADE)
    with reading(folder):
        card = Card(**json.loads((folder / CARD).read_text()))
    if card.format != _FORMAT:
        raise StartupError(f"{folder} has format {card.format}, this version reads {_FORMAT}: train it again")
    return card


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise StartupError for any error inside: a card and weights that do not fit each other can fail anywhere."""
    try:
        yield
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        message = f"the drafter in {folder} is damaged ({what}); train or download it again"
        raise StartupError(message, field="model", value=str(folder)) from error
