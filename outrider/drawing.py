"""The draw that drafter and target share: greedy and coupled.

Both sides call the same function with the same seed and position; where
their distributions are alike, so is the token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider import noise, sampling
from outrider.messages import SamplingParams


def shared_draw(logits: torch.Tensor, params: SamplingParams, positions: Sequence[int]) -> list[int]:
    """The token that each row of adjusted logits yields at its absolute position.  # [rows, vocab]"""
    if params.greedy:
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    assert params.seed is not None
    kept = sampling.candidates(logits, params)
    keys = [noise.key(params.seed, noise.Use.COUPLED, position) for position in positions]
    columns = noise.race(keys, kept.ids, kept.probs)
    if kept.ids.dim() == 1:
        return [int(column) for column in columns.tolist()]
    return [int(token) for token in kept.ids.gather(1, columns[:, None])[:, 0].tolist()]
