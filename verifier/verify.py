"""From a session's logits to a verdict: draw or accept, by the request's verification mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from outrider.engine import StepResult
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import TokenLogprobs
from outrider.speculation import acceptance, sampling
from outrider.speculation.acceptance import Outcome, RandomSource
from outrider.speculation.exponential_race import shared_draw
from outrider.speculation.grammar import Masks
from outrider.speculation.sampling import History
from outrider.speculation.tree import Block


@dataclass(frozen=True, slots=True)
class VerifyResult:
    outcome: Outcome
    tokens: tuple[int, ...]  # the accepted ones and the target's own
    logprobs: tuple[TokenLogprobs, ...]


def judge(
    logits: torch.Tensor,
    block: Block,
    position: int,
    params: SamplingParams,
    history: History | None,
    chance: RandomSource,
    likeliest: Sequence[int] = (),
    allowed: Masks | None = None,
) -> VerifyResult:
    """`logits` answers row 0, the token at position − 1, and each guess of the block.  # [1 + guesses, vocab]

    `likeliest` is the argmax of each row, where somebody has it already; `allowed` what a grammar lets follow each.
    """
    if likeliest and params.logprobs is None and plainly_greedy(params):
        outcome = acceptance.walk(block.tokens, block.parents, likeliest)
        return VerifyResult(outcome, _tokens(block, outcome), ())
    paths = block.paths
    adjusted = sampling.adjust(logits, params, history, paths)
    if allowed is not None:
        adjusted = sampling.restrict(adjusted, allowed)
    outcome = _outcome(adjusted, block, paths, position, params, chance)
    tokens = _tokens(block, outcome)
    found: Sequence[TokenLogprobs] = ()
    if params.logprobs is not None:
        rows = torch.tensor([0, *outcome.path], device=logits.device)
        found = sampling.logprobs(logits[rows], tokens, params.logprobs)
    return VerifyResult(outcome, tokens, tuple(found))


def plainly_greedy(params: SamplingParams) -> bool:
    return params.greedy and not params.penalised and not params.logit_bias and params.grammar is None


def likeliest_of_all(done: StepResult, params: Sequence[SamplingParams]) -> list[list[int]]:
    """The argmax of every row of a step at once, per Rows; empty when no session of it draws that way."""
    if not any(plainly_greedy(each) for each in params):
        return [[] for _ in done.logits]
    rows = iter(done.all_logits.argmax(dim=-1).tolist())
    return [list(islice(rows, len(part))) for part in done.logits]


def _tokens(block: Block, outcome: Outcome) -> tuple[int, ...]:
    return (*(block.tokens[row - 1] for row in outcome.path), outcome.final)


def _outcome(
    adjusted: torch.Tensor,
    block: Block,
    paths: Sequence[Sequence[int]],
    position: int,
    params: SamplingParams,
    chance: RandomSource,
) -> Outcome:
    if not params.mode.needs_draft_probs:
        drawn = shared_draw(adjusted, params, [position + len(path) for path in paths])
        return acceptance.walk(block.tokens, block.parents, drawn)
    target = sampling.candidates(adjusted, params).dense(adjusted.shape[-1])
    draft = [node.draft_prob for node in block.nodes if node.draft_prob is not None]
    rule = acceptance.block if params.mode is Verification.BLOCK else acceptance.rejection
    return rule(block.tokens, target, draft, position, chance)
