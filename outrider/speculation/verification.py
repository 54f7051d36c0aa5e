"""Verification of one session's guesses: from the target's logits to accepted tokens and the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import Guess, TokenLogprobs
from outrider.speculation import acceptance, sampling
from outrider.speculation.acceptance import Outcome, RandomSource
from outrider.speculation.exponential_race import shared_draw
from outrider.speculation.grammar import Masks
from outrider.speculation.sampling import History


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Outcome of verification with its tokens and their log-probabilities."""

    outcome: Outcome
    tokens: tuple[int, ...]  # the accepted ones and the target's own
    logprobs: tuple[TokenLogprobs, ...]


def verify(
    logits: torch.Tensor,
    block: Guess,
    position: int,
    params: SamplingParams,
    history: History | None,
    chance: RandomSource,
    argmax: Sequence[int] = (),
    allowed: Masks | None = None,
) -> VerifyResult:
    """Verify the guesses of `block` by the request's verification mode.

    Row 0 of `logits` is the target's prediction at `position`; row i + 1 is
    the one after guess i.  # [1 + guesses, vocab]
    `argmax` is the argmax of each row, if it is known already; `allowed` are
    the tokens that the grammar allows at each row.
    """
    if argmax and params.logprobs is None and is_plain_argmax(params):
        outcome = acceptance.walk(block.tokens, block.shape.parents, argmax)
        return VerifyResult(outcome, _tokens(block, outcome), ())
    paths = block.paths
    adjusted = sampling.adjust(logits, params, history, paths)
    if allowed is not None:
        adjusted = sampling.restrict(adjusted, allowed)
    outcome = _outcome(adjusted, block, paths, position, params, chance)
    tokens = _tokens(block, outcome)
    logprobs: Sequence[TokenLogprobs] = ()
    if params.logprobs is not None:
        rows = torch.tensor([0, *outcome.path], device=logits.device)
        logprobs = sampling.logprobs(logits[rows], tokens, params.logprobs)
    return VerifyResult(outcome, tokens, tuple(logprobs))


def is_plain_argmax(params: SamplingParams) -> bool:
    """Return whether the target's token is the argmax of the unchanged logits."""
    return params.greedy and not params.penalised and not params.logit_bias and params.grammar is None


def argmax_per_session(
    logits: torch.Tensor, counts: Sequence[int], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Return the argmax of every row of a step, per session, in one operation; empty if no session needs it.

    `counts` are the rows of each session in `logits`.  # [rows, vocab]
    """
    if not any(is_plain_argmax(each) for each in params):
        return [[] for _ in counts]
    tokens = iter(logits.argmax(dim=-1).tolist())
    return [list(islice(tokens, count)) for count in counts]


def _tokens(block: Guess, outcome: Outcome) -> tuple[int, ...]:
    return (*(block.tokens[row - 1] for row in outcome.path), outcome.final)


def _outcome(
    adjusted: torch.Tensor,
    block: Guess,
    paths: Sequence[Sequence[int]],
    position: int,
    params: SamplingParams,
    chance: RandomSource,
) -> Outcome:
    if not params.mode.needs_draft_probs:
        drawn = shared_draw(adjusted, params, [position + len(path) for path in paths])
        return acceptance.walk(block.tokens, block.shape.parents, drawn)
    target = sampling.candidates(adjusted, params).dense(adjusted.shape[-1])
    rule = acceptance.block if params.mode is Verification.BLOCK else acceptance.rejection
    return rule(block.tokens, target, block.draft_probs, position, chance)
