"""Batches for training: which part of a long text is learnt."""

from __future__ import annotations

import pytest
import torch

from outrider.train.data import Example
from outrider.train.methods.interface import collate

CPU = torch.device("cpu")
POSITIONS = 40


def text(prompt: int, written: int) -> Example:
    """Return a text whose token i is i, with states that tell their position."""
    count = prompt + written
    at = torch.arange(count - 1)[:, None]
    return Example(torch.arange(count), prompt, at.to(torch.float16), at.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("prompt", "written", "first", "learnt"),
    [
        (10, 20, 0, 20),
        (10, 60, 0, 32),  # as many as there are positions
        (100, 60, 80, 22),  # of a long prompt the last half of the positions
        (100, 10, 68, 10),  # and more where the text is short
        (30, 12, 0, 12),
    ],
)
def test_a_long_prompt_leaves_room_for_what_the_target_wrote(
    prompt: int, written: int, first: int, learnt: int
) -> None:
    batch = collate([text(prompt, written)], POSITIONS, CPU)
    places = int(batch.lengths[0])
    assert places == min(POSITIONS, prompt + written - 2)
    assert int(batch.first[0]) == first
    assert batch.tokens[0].tolist() == list(range(first + 1, first + places + 1))
    assert batch.hidden_states[0, :, 0].tolist() == list(range(first, first + places))
    assert batch.layer_states[0, :, 0].tolist() == list(range(first, first + places))
    assert batch.wanted[0, :, 0].tolist() == list(range(first + 1, first + places + 1))
    # A position's `tokens` is the next token, whose own successor the drafter guesses there.
    assert int(batch.written.sum()) == learnt
    assert batch.tokens[0][batch.written[0]].tolist() == list(range(prompt - 1, prompt - 1 + learnt))
