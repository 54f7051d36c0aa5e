"""The acceptance rules of one session: the product verifies all sessions of a step together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.protocol.sampling_params import Verification
from outrider.protocol.speculation import Distribution, Guess
from outrider.speculation.acceptance import Outcome, RandomSource, verify_drawn
from outrider.speculation.verification import SessionSampling, VerifyResult, verify_batch


def rejection(
    tokens: Sequence[int], target: torch.Tensor, draft: Sequence[Distribution], position: int, chance: RandomSource
) -> Outcome:
    """Verify token by token; `target` is [len(tokens) + 1, vocab], and guess i is for position + i."""
    guess = Guess(position, 0, 0, tuple(tokens), tuple(draft))
    return verify_drawn([guess], [Verification.REJECTION], [chance], target)[0]


def block(
    tokens: Sequence[int], target: torch.Tensor, draft: Sequence[Distribution], position: int, chance: RandomSource
) -> Outcome:
    """Verify a whole block at once."""
    guess = Guess(position, 0, 0, tuple(tokens), tuple(draft))
    return verify_drawn([guess], [Verification.BLOCK], [chance], target)[0]


def verify(logits: torch.Tensor, guess: Guess, session: SessionSampling) -> VerifyResult:
    """Verify the guesses of one session by its verification mode.  # [1 + guesses, vocab]"""
    return verify_batch(logits, [guess], [session], [0])[0]
