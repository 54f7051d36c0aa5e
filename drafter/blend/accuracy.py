"""Measured accuracy of each drafting method, from the tokens committed later. Pure; `blend` selects by it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from drafter.interface import DraftRequest
from outrider.protocol.speculation import MAX_GAMMA, Guess

_DECAY = 0.95  # per outcome: about the last twenty count
_RECOVERY = 0.01  # per committed token: a model that was poor in an old part of a text is tried again
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

    def recover(self, prior: float, tokens: float) -> None:
        """Let the outcomes weigh less after more tokens if they are below the prior: a lower rate may never be used."""
        if self.total < prior * self.weight:
            kept = (1.0 - _RECOVERY) ** tokens
            self.total, self.weight = self.total * kept, self.weight * kept

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


class AccuracyTracker:
    """Guesses of one session's drafters at positions that are not committed yet.

    A guess counts if the token before it was committed as guessed: comparing whole paths would cost more than it mends.
    """

    def __init__(self, committed: int) -> None:
        self._committed = committed
        # By drafter and position: the token before a chain, used or not, its tokens, and how many should be accepted.
        self._chains: dict[tuple[str, int], tuple[int, tuple[int, ...], float]] = {}
        # By drafter and position: guessed tokens by the token before them.
        self._tokens_by_position: dict[tuple[str, int], dict[int, set[int]]] = {}

    def record_chain(self, name: str, request: DraftRequest, guess: Guess) -> None:
        """Record a chain proposed after `request.tokens`."""
        tokens = request.new_tokens(guess)
        if tokens and len(self._chains) < _MAX_PENDING:
            self._chains[name, len(request.tokens)] = request.tokens[-1], tokens, guess.expected

    def record_tokens(self, name: str, request: DraftRequest, guess: Guess) -> None:
        """Record the new tokens of a chain or a tree, to be compared one by one."""
        parents, depths = guess.shape.parents, guess.shape.depths
        for node in range(len(request.open_guess.tokens), len(guess.tokens)):
            previous = guess.tokens[parents[node]] if parents[node] >= 0 else request.tokens[request.committed - 1]
            guessed = self._tokens_by_position.setdefault((name, request.committed + depths[node] - 1), {})
            guessed.setdefault(previous, set()).add(guess.tokens[node])

    def update(self, request: DraftRequest, records: Sequence[dict[str, Record]]) -> int:
        """Add the outcomes of newly committed tokens to all `records`; return the number of these tokens."""
        new = range(self._committed, request.committed)
        if not new:
            return 0
        self._committed = request.committed
        tokens, known = request.tokens, self._tokens_by_position
        for name, position in [key for key in known if key[1] < new.stop]:
            guessed = known.pop((name, position))
            if position >= new.start and tokens[position - 1] in guessed:
                for record in records:
                    record[name].hits.add(tokens[position] in guessed[tokens[position - 1]])
        for name, expected, accepted in self._chain_outcomes(request):
            for record in records:
                record[name].record_outcome(expected, accepted)
        return len(new)

    def _chain_outcomes(self, request: DraftRequest) -> Iterator[tuple[str, float, int]]:
        """Yield drafter, expected and accepted tokens of chains that follow a committed token, once known."""
        for (name, start), (previous, tokens, expected) in list(self._chains.items()):
            if start >= request.committed:
                continue
            known = request.tokens[start : min(request.committed, start + len(tokens))]
            agreed = next((i for i, token in enumerate(known) if token != tokens[i]), len(known))
            if request.tokens[start - 1] != previous:
                del self._chains[name, start]
            elif agreed < len(known) or agreed == len(tokens):
                del self._chains[name, start]
                yield name, expected, agreed
