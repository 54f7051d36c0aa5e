"""Expected tokens per second of one draft and verify round, for `blend` to choose by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundEstimate:
    """Expected tokens and time of a round in which a model drafts, given the levels that are open already."""

    hit_rate: float
    depth: int  # open levels
    level_s: float  # the model's time per level
    rest_s: float  # time of the round without drafting

    def chain(self, length: int) -> float:
        """Return the expected accepted tokens of a model's chain."""
        return sum(self.hit_rate**i for i in range(1, length + 1))

    @property
    def open_accepted(self) -> float:
        """Return the expected accepted tokens of the open levels."""
        return self.chain(self.depth)

    def with_proposal(self, expected: float) -> float:
        """Return the expected accepted tokens with a proposal, of `expected` tokens, after the open levels."""
        return self.open_accepted + self.hit_rate**self.depth * expected

    def with_model(self, levels: int) -> float:
        """Return tokens per second if the model drafts so many more levels."""
        return self.tokens_per_s(self.chain(self.depth + levels), levels)

    def tokens_per_s(self, accepted: float, levels: int) -> float:
        """Return tokens per second, the target's own token included, if the model drafts so many more levels."""
        return (1 + accepted) / max(self.rest_s + (self.depth + levels) * self.level_s, 1e-9)


def full_acceptance_probability(expected: float, tokens: int) -> float:
    """Return the probability that all of `tokens` are accepted, if it falls linearly along the chain."""
    return max(0.0, 1 - (1 - min(expected / tokens, 1.0)) * 2 * tokens / (tokens + 1))
