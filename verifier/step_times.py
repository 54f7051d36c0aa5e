"""Predicted step times, and the number of prompt tokens that a step can carry without delaying other sessions."""

from __future__ import annotations

from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.cost_curve import CostCurve

_LEAST_PREFILL_RATIO = 0.8  # beside decoding sessions, whose logits are computed
_MIN_PROMPT_TOKENS = 8  # per step, so that every prefill makes progress


class StepTimes:
    """Cost curve measured at start, with its present ratio to the times of real steps.

    Steps with prompt tokens have a ratio of their own to the others: they have no logits of these tokens, and their
    attention reads more of the cache as the prompt grows.
    """

    def __init__(self, measured: CostCurve) -> None:
        self._measured = measured
        self.known = bool(measured.rows)
        self._decode_ratio = DecayedMean(0.1, 1.0)
        self._prefill_ratio = DecayedMean(0.1, 1.0)  # times the one before

    def curve(self) -> CostCurve:
        return self._measured.scaled(self._decode_ratio.value)

    def step_ms(self, tokens: int) -> float:
        """Return the predicted time of a step."""
        return self._decode_ratio.value * self._measured.at(tokens)

    def extra_tokens(self, tokens: int, extra_ms: float, max_tokens: int) -> int:
        """Return how many tokens can join a step of `tokens` that may take `extra_ms` longer; of 0 tokens: as long."""
        allowed_ms = (self._measured.at(tokens) if tokens else 0.0) + extra_ms / self._decode_ratio.value
        return max(0, self._measured.tokens_within(allowed_ms, tokens + max_tokens) - tokens)

    def record(self, tokens: int, ms: float, *, has_prompts: bool) -> None:
        """Update the ratio of measured to predicted time after a step."""
        if not self.known:
            return
        mean, ratio = self._decode_ratio, ms / self._measured.at(tokens)
        if has_prompts:
            mean, ratio = self._prefill_ratio, ratio / self._decode_ratio.value
        mean.add(min(ratio, 2 * mean.value))  # more is other load

    def prompt_tokens(self, tokens: int, stretch: float, max_tokens: int) -> int:
        """Return how many prompt tokens can join a step of `tokens` that may take `stretch` times as long."""
        if not self.known:
            return max_tokens
        allowed_ms = stretch * self._measured.at(tokens) / max(self._prefill_ratio.value, _LEAST_PREFILL_RATIO)
        return max(_MIN_PROMPT_TOKENS, self._measured.tokens_within(allowed_ms, tokens + max_tokens) - tokens)
