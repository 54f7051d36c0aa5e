"""Goodput: how many guesses of each session a shared step checks, so that its time brings the most tokens."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import ROOT, Guess
from outrider.speculation.tree import GuessTree

_COMPARED, _LEAST_COMPARED = 256, 4  # guesses of a step, and of a session: the comparison takes time as well
_TOLERANCE = 1.02  # times that vary by less are equal
_FAR_BELOW = 0.9  # of the best so far: what follows is worth less still


class SteppingSession(Protocol):
    """Session of a verifier's step."""

    tree: GuessTree
    pace: DecayedMean

    @property
    def paying_guesses(self) -> int:
        """Return how many guesses of it a step may check, as far as they pay; 0: all of its block."""


def new_pace() -> DecayedMean:
    """Return the mean number of tokens that a session's steps commit."""
    return DecayedMean(0.05, 1.0)


def compared_guesses(sessions: int) -> int:
    """Return among how many guesses of each session a step chooses."""
    return max(_LEAST_COMPARED, _COMPARED // max(1, sessions))


def paying_blocks(
    sessions: Sequence[SteppingSession], blocks: Sequence[Guess], tokens: int, cost: CostCurve
) -> list[Guess]:
    """Return what remains of a step's blocks; it depends on what was committed, never on tokens of this step."""
    chances = [
        _chances(each.tree, block) if each.paying_guesses else () for each, block in zip(sessions, blocks, strict=True)
    ]
    paces = [session.pace.value for session in sessions]
    numbers = paying_guesses(chances, paces, tokens - sum(map(len, chances)), cost)
    return [
        block.part(ROOT, range(number)) if number < len(compared) else block
        for block, compared, number in zip(blocks, chances, numbers, strict=True)
    ]


def paying_guesses(
    chances: Sequence[Sequence[float]], paces: Sequence[float], tokens: int, cost: CostCurve
) -> list[int]:
    """Return the number of guesses of each session that a step takes, besides its other `tokens`.

    `chances` are each session's probabilities that a guess is accepted, the likeliest first, and `paces` the tokens
    that its steps have brought. The guesses taken bring the most expected tokens per millisecond. They lengthen the
    step by no more than each session gains, in this step or in its steps so far, over steps without guesses.
    """
    plain_ms = cost.at(tokens)
    if cost.at(tokens + sum(map(len, chances))) <= plain_ms:
        return list(map(len, chances))
    expected, total = [1.0] * len(chances), float(len(chances))
    best, num_best = total / plain_ms, 0
    order: list[int] = []  # the session of each guess, the likeliest guess first
    queue = [(-own[0], session, 0) for session, own in enumerate(chances) if own]
    heapq.heapify(queue)
    while queue and total / cost.at(tokens + len(order)) > _FAR_BELOW * best:
        negated, session, index = heapq.heappop(queue)
        order.append(session)
        expected[session] -= negated
        total -= negated
        if index + 1 < len(chances[session]):
            heapq.heappush(queue, (-chances[session][index + 1], session, index + 1))
        step_ms = cost.at(tokens + len(order))
        if total > best * step_ms and step_ms <= _TOLERANCE * plain_ms * min(map(max, expected, paces)):
            best, num_best = total / step_ms, len(order)
    taken = Counter(order[:num_best])
    return [taken[session] for session in range(len(chances))]


def _chances(tree: GuessTree, block: Guess) -> Sequence[float]:
    """Return how likely each guess of a block is accepted."""
    ranks = [node.rank for node in tree.nodes(block)]
    return block.shape.accumulate(ranks, lambda chance, rank: chance * tree.rates[rank], 1.0)
