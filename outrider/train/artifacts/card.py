"""A trained drafter's folder: card.json says what it is and for whom, weights.safetensors is the rest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.base.atomic_files import replacing
from outrider.models.hub import CARD
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo

WEIGHTS = "weights.safetensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Card:
    method: str
    target: str  # as a person calls it
    target_lineage: str  # of its weights, whatever the number format it runs in
    vocabulary_digest: str
    ends_digest: str  # of the target's embeddings and head
    shape: dict[str, Any]  # what the weights are made into
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    format: int = _FORMAT

    def check_target(self, folder: Path, target: str, ends_digest: str) -> None:
        if ends_digest != self.ends_digest:
            raise StartupError(
                f"the drafter in {folder} was made for {self.target}, not for {target}; `outrider train` makes another",
                field="target",
                value=target,
                limit=self.target,
            )

    def info(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> ModelInfo:
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


def save(folder: Path, card: Card, weights: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as file:
        save_file({name: weight.contiguous() for name, weight in weights.items()}, file)
        file.chmod(0o644)  # readable for whoever serves it
    with replacing(folder / CARD) as file:
        file.write_text(json.dumps(asdict(card), indent=2) + "\n")


def locate(name: str, method: str) -> Path:
    """The folder of a trained drafter; `default` and nothing name the one that comes with Outrider."""
    if name not in ("", "default"):
        return Path(name).expanduser()
    bundled = Path(str(files("outrider.bundled")))
    found = next(
        (path.parent for path in sorted(bundled.glob(f"*/{CARD}")) if read_card(path.parent).method == method), None
    )
    if found is None:
        raise StartupError(
            f"kind {method} needs --model: no drafter of that kind comes with Outrider",
            field="model",
            value=name,
            limit="a folder made by `outrider train`",
        )
    return found


def is_trained(name: str) -> bool:
    return (Path(name).expanduser() / CARD).is_file()


def load(folder: Path, method: str) -> tuple[Card, dict[str, torch.Tensor]]:
    """Raises StartupError with what is wrong with it."""
    card = read_card(folder)
    if card.method != method:
        raise StartupError(
            f"{folder} holds a drafter of kind {card.method}, not {method}",
            field="kind",
            value=method,
            limit=card.method,
        )
    try:
        return card, load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _damaged(folder, error) from error


def read_card(folder: Path) -> Card:
    if not (folder / CARD).is_file():
        raise StartupError(
            f"{folder} holds no trained drafter: no {CARD}",
            field="model",
            value=str(folder),
            limit="a folder made by `outrider train`",
        )
    try:
        card = Card(**json.loads((folder / CARD).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(folder, error) from error
    if card.format != _FORMAT:
        raise StartupError(f"{folder} is of format {card.format}; this Outrider reads {_FORMAT}: train it again")
    return card


def _damaged(folder: Path, error: Exception) -> StartupError:
    return StartupError(
        f"the drafter in {folder} is damaged ({error}); train it again or fetch it again",
        field="model",
        value=str(folder),
    )
