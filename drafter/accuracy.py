"""Measured accuracy of each drafting method, from the tokens committed later. Pure; `blend` selects by it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from drafter.interface import DraftRequest, DraftResult
from outrider.protocol.speculation import MAX_GAMMA, TreeShape

_DECAY = 0.95  # per outcome: about the last twenty count
_PRIOR_WEIGHT = 4.0  # the prior weighs as much as this many outcomes
_EXPECTED_BOUNDS = (1.0, 2.0, 4.0, 8.0)  # proposals are rated separately by their expected length
_MAX_PENDING = 2 * MAX_GAMMA


@dataclass(slots=True)
class Rate:
    """Decayed ratio of two sums, shrunk towards a prior."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.total = self.total * _DECAY + value
        self.weight = self.weight * _DECAY + weight

    def value(self, prior: float) -> float:
        return (self.total + prior * _PRIOR_WEIGHT) / (self.weight + _PRIOR_WEIGHT)


@dataclass(slots=True)
class Record:
    """Accuracy of one drafter: hit rate per token, and accepted tokens per expected token of its proposals."""

    hits: Rate = field(default_factory=Rate)
    accepted_share: list[Rate] = field(default_factory=lambda: [Rate() for _ in range(len(_EXPECTED_BOUNDS) + 1)])

    def record_outcome(self, expected: float, accepted: int) -> None:
        self.accepted_share[bisect.bisect(_EXPECTED_BOUNDS, expected)].add(accepted, expected)

    def expected_accepted(self, expected: float, shared: Record) -> float:
        """Return the corrected number of accepted tokens; `shared` is the record over all sessions."""
        bucket = bisect.bisect(_EXPECTED_BOUNDS, expected)
        return expected * self.accepted_share[bucket].value(shared.accepted_share[bucket].value(1.0))

    def hit_rate(self, shared: Record, prior: float) -> float:
        return self.hits.value(shared.hits.value(prior))


@dataclass(frozen=True, slots=True)
class _ProposedChain:
    """Chain that was proposed after a token, whether or not it was used."""

    name: str
    start: int
    previous: int
    tokens: tuple[int, ...]
    expected: float


class AccuracyTracker:
    """Guesses of one session's drafters at positions that are not committed yet.

    A guess counts if the token before it was committed as guessed. Comparing
    its whole path would cost more than the few errors of this rule.
    """

    def __init__(self, committed: int) -> None:
        self._committed = committed
        self._chains: dict[tuple[str, int], _ProposedChain] = {}
        # By drafter and position: guessed tokens by the token before them.
        self._tokens_by_position: dict[tuple[str, int], dict[int, set[int]]] = {}

    def record_chain(self, name: str, request: DraftRequest, tokens: tuple[int, ...], expected: float) -> None:
        """Record a chain proposed after `request.tokens` with its expected number of accepted tokens."""
        start = len(request.tokens)
        if tokens and len(self._chains) < _MAX_PENDING:
            self._chains[name, start] = _ProposedChain(name, start, request.tokens[-1], tokens, expected)

    def record_tokens(self, name: str, request: DraftRequest, result: DraftResult) -> None:
        """Record the tokens of a chain or a tree, to be compared one by one."""
        for position, previous, token in token_positions(request, result):
            self._tokens_by_position.setdefault((name, position), {}).setdefault(previous, set()).add(token)

    def update(self, request: DraftRequest, records: Sequence[dict[str, Record]]) -> int:
        """Add the outcomes of newly committed tokens to all `records`; return the number of these tokens."""
        new = range(self._committed, request.committed)
        if not new:
            return 0
        self._committed = request.committed
        for name, hit in self._hits(request.tokens, new):
            for record in records:
                record[name].hits.add(hit)
        for chain, accepted in self._chain_outcomes(request):
            for record in records:
                record[chain.name].record_outcome(chain.expected, accepted)
        return len(new)

    def _hits(self, tokens: Sequence[int], new: range) -> Iterator[tuple[str, bool]]:
        for name, position in [key for key in self._tokens_by_position if key[1] < new.stop]:
            guessed = self._tokens_by_position.pop((name, position))
            if position >= new.start and tokens[position - 1] in guessed:
                yield name, tokens[position] in guessed[tokens[position - 1]]

    def _chain_outcomes(self, request: DraftRequest) -> Iterator[tuple[_ProposedChain, int]]:
        """Yield the chains whose outcome is known; drop those whose previous token was not committed."""
        for key, chain in list(self._chains.items()):
            if chain.start >= request.committed:
                continue
            known = request.tokens[chain.start : min(request.committed, chain.start + len(chain.tokens))]
            agreed = next((i for i, token in enumerate(known) if token != chain.tokens[i]), len(known))
            if request.tokens[chain.start - 1] != chain.previous:
                del self._chains[key]
            elif agreed < len(known) or agreed == len(chain.tokens):
                del self._chains[key]
                yield chain, agreed


def token_positions(request: DraftRequest, result: DraftResult) -> Iterator[tuple[int, int, int]]:
    """Yield the position, the token before it, and the token of each drafted token."""
    if not result.parents:
        previous = request.tokens[-1]
        for position, token in enumerate(result.tokens, start=len(request.tokens)):
            yield position, previous, token
            previous = token
        return
    tokens = (*request.open_tokens, *result.tokens)
    shape = TreeShape((*request.open_parents, *result.parents))
    for node in range(len(request.open_tokens), len(tokens)):
        parent = shape.parents[node]
        previous = tokens[parent] if parent >= 0 else request.tokens[request.committed - 1]
        yield request.committed + shape.depths[node] - 1, previous, tokens[node]
