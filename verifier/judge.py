"""From a session's logits to a verdict: draw or accept, by the request's verification mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider import acceptance, sampling
from outrider.acceptance import Chance, Outcome
from outrider.drawing import shared_draw
from outrider.messages import SamplingParams, TokenLogprobs, Verification
from outrider.sampling import History
from outrider.tree import Block


@dataclass(frozen=True, slots=True)
class Judgement:
    outcome: Outcome
    tokens: tuple[int, ...]  # the accepted ones and the target's own
    logprobs: tuple[TokenLogprobs, ...]


def judge(
    logits: torch.Tensor,
    block: Block,
    position: int,
    params: SamplingParams,
    history: History | None,
    chance: Chance,
) -> Judgement:
    """`logits` answers row 0, the token at position − 1, and each guess of the block.  # [1 + guesses, vocab]"""
    paths = [block.path_to(row) for row in range(len(block.tokens) + 1)] if history or block.tokens else [[]]
    adjusted = sampling.adjust(logits, params, history, paths)
    outcome = _outcome(adjusted, block, paths, position, params, chance)
    tokens = (*(block.tokens[row - 1] for row in outcome.path), outcome.final)
    found: Sequence[TokenLogprobs] = ()
    if params.logprobs is not None:
        rows = torch.tensor([0, *outcome.path], device=logits.device)
        found = sampling.logprobs(logits[rows], tokens, params.logprobs)
    return Judgement(outcome, tokens, tuple(found))


def _outcome(
    adjusted: torch.Tensor,
    block: Block,
    paths: Sequence[Sequence[int]],
    position: int,
    params: SamplingParams,
    chance: Chance,
) -> Outcome:
    if not params.mode.needs_draft_probs:
        drawn = shared_draw(adjusted, params, [position + len(path) for path in paths])
        return acceptance.walk(block.tokens, block.parents, drawn)
    target = sampling.candidates(adjusted, params).dense(adjusted.shape[-1])
    draft = [node.draft_prob for node in block.nodes if node.draft_prob is not None]
    rule = acceptance.block if params.mode is Verification.BLOCK else acceptance.rejection
    return rule(block.tokens, target, draft, position, chance)
