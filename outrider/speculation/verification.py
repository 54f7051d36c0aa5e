"""Verification of a step's guesses: from the target's logits to accepted tokens and the target's own.

All sessions of a step are verified together. Sessions with equal needs form a group, which takes a few operations
whatever its size. A session's result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Guess, TokenLogprobs
from outrider.speculation import acceptance, sampling
from outrider.speculation.acceptance import Outcome, RandomSource
from outrider.speculation.exponential_race import coupled_draws
from outrider.speculation.grammar import Masks
from outrider.speculation.noise import to_device
from outrider.speculation.sampling import Continuations, CutKind, Cuts, History, cut_kind


class VerifyResult(NamedTuple):
    """Outcome of verification with its tokens and their log-probabilities."""

    outcome: Outcome
    tokens: tuple[int, ...]  # the accepted ones and the target's own
    logprobs: tuple[TokenLogprobs, ...]


class SessionSampling(NamedTuple):
    """The sampling state of a session; `allowed` are the tokens that the grammar allows at each row of the step."""

    params: SamplingParams
    history: History | None  # None without penalties
    chance: RandomSource
    allowed: Masks | None = None

    @property
    def needs(self) -> _Needs:
        params = self.params
        cuts = None if params.greedy else cut_kind(params)
        penalised = self.history is not None
        adjusted = penalised or bool(params.logit_bias) or self.allowed is not None
        return _Needs(adjusted, penalised, self.allowed is not None, params.mode.needs_draft_probs, cuts)


class _Needs(NamedTuple):
    """Common needs of the sessions of a group."""

    adjusted: bool
    penalised: bool
    masked: bool
    draft_probs: bool  # rejection or block
    cuts: CutKind | None  # None: greedy


def verify_batch(
    logits: torch.Tensor, blocks: Sequence[Guess], sessions: Sequence[SessionSampling], firsts: Sequence[int]
) -> list[VerifyResult]:
    """Verify the guesses of all sessions of a step, each by its request's verification mode.  # [rows, vocab]

    Row firsts[i] is the target's prediction at session i's block, row firsts[i] + 1 + j the one after guess j.
    """
    step = _StepRows(logits, blocks, sessions, firsts)
    groups: dict[_Needs, list[int]] = {}
    for index, session in enumerate(sessions):
        groups.setdefault(session.needs, []).append(index)
    outcomes: dict[int, Outcome] = {}
    for needs, members in groups.items():
        if needs.draft_probs:
            outcomes.update(zip(members, step.verify_drawn(members, needs), strict=True))
    walked = [(members, step.draw(members, needs)) for needs, members in groups.items() if not needs.draft_probs]
    tokens = iter(torch.cat([drawn for _, drawn in walked]).tolist() if walked else [])
    for index in chain.from_iterable(members for members, _ in walked):
        drawn = list(islice(tokens, len(step.rows[index])))
        outcomes[index] = acceptance.walk(blocks[index], drawn)
    return step.results([outcomes[index] for index in range(len(sessions))])


class _StepRows:
    """The logits of a step with its sessions; `members` are indices of sessions with equal needs."""

    def __init__(
        self, logits: torch.Tensor, blocks: Sequence[Guess], sessions: Sequence[SessionSampling], firsts: Sequence[int]
    ) -> None:
        self._logits = logits
        self._blocks = blocks
        self._sessions = sessions
        self.rows = [range(first, first + 1 + len(block.tokens)) for first, block in zip(firsts, blocks, strict=True)]

    def draw(self, members: Sequence[int], needs: _Needs) -> torch.Tensor:
        """Return the target's own token at each row, as a drafter with its noise draws too.  # [rows]"""
        rows = self._adjusted(members, needs) if needs.adjusted else self._select(self._logits, members)
        if needs.cuts is None:
            return acceptance.likeliest(rows)
        blocks = [self._blocks[index] for index in members]
        positions = [block.position + depth for block in blocks for depth in (0, *block.shape.depths)]
        return coupled_draws(rows, self._params(members), positions)

    def verify_drawn(self, members: Sequence[int], needs: _Needs) -> list[Outcome]:
        """Verify guesses that drafters drew from their own distributions."""
        adjusted = self._adjusted(members, needs)
        kept = sampling.cut(adjusted, Cuts.of(self._params(members), adjusted.device))
        sessions = [self._sessions[index] for index in members]
        return acceptance.verify_drawn(
            [self._blocks[index] for index in members],
            [session.params.mode for session in sessions],
            [session.chance for session in sessions],
            kept.dense(adjusted.shape[-1]),
        )

    def results(self, outcomes: Sequence[Outcome]) -> list[VerifyResult]:
        """Return the outcomes with tokens, and with log-probabilities where they are requested."""
        results = [
            VerifyResult(outcome, (*[block.tokens[row - 1] for row in outcome.path], outcome.final), ())
            for block, outcome in zip(self._blocks, outcomes, strict=True)
        ]
        wanted = [session.params.logprobs for session in self._sessions]
        for top in {each for each in wanted if each is not None}:
            members = [index for index, each in enumerate(wanted) if each == top]
            rows = [self.rows[index][row] for index in members for row in (0, *outcomes[index].path)]
            tokens = [token for index in members for token in results[index].tokens]
            chosen = self._logits.index_select(0, to_device(torch.tensor(rows), self._logits.device))
            logprobs = iter(sampling.logprobs(chosen, tokens, top))
            for index in members:
                own = tuple(islice(logprobs, len(results[index].tokens)))
                results[index] = results[index]._replace(logprobs=own)
        return results

    def _params(self, members: Sequence[int]) -> list[SamplingParams]:
        return [self._sessions[index].params for index in members for _ in self.rows[index]]

    def _adjusted(self, members: Sequence[int], needs: _Needs) -> torch.Tensor:
        """Return the members' rows with bias, penalties and grammars."""
        rows = self._select(self._logits, members)
        if not needs.adjusted:  # verify_drawn asks in any case
            return rows
        sessions = [(self._sessions[index], self._blocks[index].paths) for index in members]
        needed = [Continuations(each.params, each.history, paths, each.allowed) for each, paths in sessions]
        return sampling.adjust_all(rows, needed)

    def _select(self, values: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
        """Return the members' rows, without a copy where they are adjacent."""
        rows = list(chain.from_iterable(self.rows[index] for index in members))
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return values[rows[0] : rows[0] + len(rows)]
        return values.index_select(0, to_device(torch.tensor(rows), values.device))
