"""Early exits that `outrider tune` compares: their best γ, and the gain that follows from the cost of a step."""

from __future__ import annotations

import pytest
import torch

from outrider.protocol.cost_curve import CostCurve
from outrider.train.tune import _exit

FLAT = CostCurve((1, 32), (10.0, 10.0))
STEEP = CostCurve((1, 2, 3), (10.0, 10.0, 20.0))
ROOM = 4  # guesses that fit behind each position


@pytest.mark.parametrize(
    ("layers", "cost", "gamma", "speed_up"),
    [
        (1, FLAT, 2, 10 * 1.75 / (10 + 2 * 1)),  # the layer of ten takes a tenth of a step
        (3, FLAT, 1, 10 * 1.5 / (10 + 3)),
        (1, STEEP, 1, 10 * 1.5 / (10 + 1)),
    ],
)
def test_an_exit_is_told_at_its_best_gamma(layers: int, cost: CostCurve, gamma: int, speed_up: float) -> None:
    """Half of the first guesses hold, half of the second ones behind them, and no third one."""
    lengths = torch.tensor([[2, 1, 0, 0, -1], [ROOM] * 5])
    found = _exit(layers, 9, lengths, cost, gamma_max=3)
    assert found.acceptance == (0.5, 0.5, 0.0)
    assert (found.layers, found.gamma) == (layers, gamma)
    assert found.speed_up == pytest.approx(speed_up)
