"""Steps of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.protocol.errors import StartupError
from outrider.train.data import Example
from outrider.train.loop import CHECKPOINT, Training, TrainingPlan
from outrider.train.methods.interface import Batch


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


def test_gradients_that_are_not_finite_end_the_run_and_change_no_weight(tmp_path: Path) -> None:
    texts = [Example(torch.arange(8), 2, torch.zeros(7, 4), torch.zeros(7, 0))]
    method, plan = RootMethod(), TrainingPlan(tokens=100)
    training = Training(method, texts, {"chat": texts}, plan, tmp_path, {}, torch.device("cpu"))
    with pytest.raises(StartupError, match=r"gradients of inf at step 0: try a lower --learning-rate"):
        training.run()
    assert method.module.weight.item() == 0.0
    assert not (tmp_path / CHECKPOINT).exists()
