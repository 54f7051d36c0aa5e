"""Steps of the training loop."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.models.drafter_choice import CARD
from outrider.protocol.errors import InvalidRequest, StartupError
from outrider.train.artifacts.card import WEIGHTS
from outrider.train.data import Example
from outrider.train.loop import CHECKPOINT, Training, TrainingPlan
from outrider.train.methods.interface import Batch
from outrider.train.run import _locked


class RootMethod:
    """Its loss is finite everywhere; its gradient is not where the weight is zero."""

    shape: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.module.weight)

    def loss(self, batch: Batch, generator: torch.Generator, done: float) -> torch.Tensor:
        return self.module.weight.sqrt().sum()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        return torch.zeros_like(batch.tokens)

    def weights(self) -> dict[str, torch.Tensor]:
        return {}


def test_texts_from_which_nothing_is_learnt_are_told(tmp_path: Path) -> None:
    """As of a target that ends at once: the steps of a run without any would be awaited for ever."""
    texts = [Example(torch.arange(2), 1, torch.zeros(1, 4), torch.zeros(1, 0))]
    with pytest.raises(InvalidRequest, match="prompts is 1 texts of the target, must be some of three tokens or more"):
        Training(RootMethod(), texts, {"chat": texts}, TrainingPlan(tokens=9), tmp_path, {}, torch.device("cpu"))


def test_a_run_that_ends_leaves_its_folder_to_one_other(tmp_path: Path) -> None:
    """The next one has opened the lock already, before this one ends."""
    with _locked(tmp_path):
        waiting = (tmp_path / ".lock").open("w")
    with waiting:
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(StartupError, match="another training run uses"), _locked(tmp_path):
            pass


def test_nothing_stays_of_files_that_a_killed_run_had_begun(tmp_path: Path) -> None:
    for name in (CHECKPOINT, WEIGHTS, CARD):
        (tmp_path / f".{name}.0123456789abcdef").touch()
    (tmp_path / ".gitattributes").touch()
    with _locked(tmp_path):
        assert {each.name for each in tmp_path.iterdir()} == {".gitattributes", ".lock"}


def test_gradients_that_are_not_finite_end_the_run_and_change_no_weight(tmp_path: Path) -> None:
    texts = [Example(torch.arange(8), 2, torch.zeros(7, 4), torch.zeros(7, 0))]
    method, plan = RootMethod(), TrainingPlan(tokens=100)
    training = Training(method, texts, {"chat": texts}, plan, tmp_path, {}, torch.device("cpu"))
    with pytest.raises(StartupError, match=r"gradients of inf at step 0: try a lower --learning-rate"):
        training.run()
    assert method.module.weight.item() == 0.0
    assert not (tmp_path / CHECKPOINT).exists()
