"""Folders of trained drafters whose parts do not fit each other: refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.methods.registry import make
from outrider.protocol.errors import StartupError
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts import card as cards
from outrider.train.artifacts.card import Card
from outrider.train.artifacts.embeddings_and_head import read_embeddings_and_head
from outrider.train.artifacts.medusa import Medusa
from outrider.train.run import TrainingOrder, Watcher, train
from tests.conftest import Models
from tests.contract.test_processes import assert_told, run

Weights = dict[str, torch.Tensor]
Shape = dict[str, Any]


def folder_of(models: Models, folder: Path, method: str, change: Callable[[Shape, Weights], object]) -> Path:
    """Write the folder of a drafter for the target, with another shape or other weights."""
    target = read_embeddings_and_head(str(models.target), lambda _: None)
    weights = Medusa(2, torch.arange(16), target).weights()
    shape: Shape = {"heads": 2, "exit_layers": 1, "layers": 1}
    change(shape, weights)
    cards.save(folder, Card(method, "target", "lineage", "", target.digest, shape), weights)
    return folder


class Silent(Watcher):
    """A watcher that shows nothing."""

    def on_status(self, text: str) -> None: ...


DAMAGES: list[tuple[str, Callable[[Shape, Weights], object]]] = [
    ("medusa", lambda shape, weights: weights.pop("ids")),
    ("medusa", lambda shape, weights: shape.pop("heads")),
    ("medusa", lambda shape, weights: shape.update(heads="2")),
    ("medusa", lambda shape, weights: shape.update(heads=3)),
    ("eagle", lambda shape, weights: None),  # the weights of another kind
    ("early-exit", lambda shape, weights: weights.pop("ids")),
    ("early-exit", lambda shape, weights: shape.update(layers="1")),
]


@pytest.mark.parametrize(("method", "change"), DAMAGES)
def test_a_folder_whose_parts_do_not_fit_each_other_is_told(
    models: Models, tmp_path: Path, method: str, change: Callable[[Shape, Weights], object]
) -> None:
    folder = folder_of(models, tmp_path, method, change)
    settings = DrafterSettings(kind=method, model=str(folder), target=str(models.target), device="cpu")
    with pytest.raises(StartupError, match=f"the drafter in {folder} is damaged"):
        make(settings, lambda _: None)


def test_training_does_not_continue_a_damaged_drafter(models: Models, tmp_path: Path) -> None:
    """It is told before texts are written, which may take hours."""
    folder = folder_of(models, tmp_path / "damaged", "eagle", lambda shape, weights: None)
    order = TrainingOrder("eagle", str(models.target), tmp_path / "out", start=str(folder), data_home=tmp_path / "data")
    with pytest.raises(StartupError, match=f"the drafter in {folder} is damaged"):
        train(order, Silent())
    assert not (tmp_path / "data").exists()


def test_a_service_with_a_damaged_drafter_ends_without_a_trace_back(models: Models, tmp_path: Path) -> None:
    method, change = DAMAGES[0]
    folder = folder_of(models, tmp_path, method, change)
    flags = ("--kind", method, "--model", str(folder), "--target", str(models.target), "--insecure")
    assert_told(run("drafter", *flags), 1, f"the drafter in {folder} is damaged", "train or download it again")
