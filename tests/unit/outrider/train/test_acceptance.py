"""Acceptance on held-out texts: what counts as accepted, as refused, and not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.train.data import Example
from outrider.train.methods.interface import Batch, acceptance, accepted_lengths, collate

GAMMA = 4


def batch_of(*sizes: tuple[int, int]) -> Batch:
    """Return a batch of texts, each with so many tokens of a prompt and of an answer."""
    texts = [Example(torch.arange(a + b), a, torch.zeros(a + b - 1, 4), torch.zeros(a + b - 1, 0)) for a, b in sizes]
    return collate(texts, 100, torch.device("cpu"))


def measured(batch: Batch, right: torch.Tensor) -> dict[str, Any]:
    """Return the acceptance of a drafter whose guesses of the token after a position are right there."""
    return acceptance(torch.stack([accepted_lengths([right] * GAMMA, batch.written), batch.room]), GAMMA)


@pytest.mark.parametrize("sizes", [[(5, 3)], [(5, 9)], [(3, 4), (6, 12)], [(2, 2)]])
def test_a_drafter_that_is_always_right_loses_nothing_at_the_end_of_a_text(sizes: list[tuple[int, int]]) -> None:
    batch = batch_of(*sizes)
    longest = min(GAMMA, max(written for _, written in sizes))
    found = measured(batch, torch.ones_like(batch.tokens, dtype=torch.bool))
    assert found["acceptance"] == [1.0] * longest + [0.0] * (GAMMA - longest)
    assert found["acceptance_length"] == 1.0 + longest


def test_each_guess_counts_where_those_before_it_held() -> None:
    """The answer has the positions 3 to 10; the guess made at position 5 is wrong."""
    batch = batch_of((5, 8))
    right = torch.ones_like(batch.tokens, dtype=torch.bool)
    right[0, 5] = False
    found = measured(batch, right)
    # First guesses: 3 to 10 but 5. Second ones: made at 4 and 5, 7 to 10. Third: at 5, 8, 9, 10. Fourth: at 9, 10.
    assert found["acceptance"] == [0.875, 0.8333, 0.75, 1.0]
    expected = 1 + 7 / 8 + 7 / 8 * 5 / 6 + 7 / 8 * 5 / 6 * 3 / 4 * 2
    assert found["acceptance_length"] == pytest.approx(expected, abs=1e-4)


def test_a_drafter_that_is_never_right_brings_the_targets_own_token() -> None:
    batch = batch_of((5, 8))
    assert measured(batch, torch.zeros_like(batch.tokens, dtype=torch.bool)) == {
        "acceptance": [0.0] * GAMMA,
        "acceptance_length": 1.0,
    }
