"""Prompt shares: guesses leave waiting prompts the tokens per millisecond that these have beside plain decoding.

Where a step costs the same for many tokens, prompts have the places that plain decoding leaves: guesses would take
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocol.speculation import ROOT, Guess
from outrider.settings.verifier import VerifierSettings
from verifier.step_times import StepTimes

_KEPT = 0.9  # of the prompts' tokens per millisecond, at least


@dataclass(frozen=True, slots=True)
class PromptShare:
    """The prompts of a step beside `decoding` sessions."""

    times: StepTimes
    limits: VerifierSettings
    decoding: int
    waiting: int  # prompt tokens

    def left(self, blocks: Sequence[Guess], tokens: int) -> list[Guess]:
        """Return what remains of the blocks of a step with so many other tokens."""
        most = self.num_guesses([len(block.tokens) for block in blocks], tokens)
        return [block.part(ROOT, range(most)) if len(block.tokens) > most else block for block in blocks]

    def num_guesses(self, lengths: Sequence[int], tokens: int) -> int:
        """Return how many guesses of each session a step of `tokens` others may have; `lengths` are those at hand."""
        most = max(lengths, default=0)
        if not (self.waiting and self.decoding and self.times.known):
            return most
        least = _KEPT * self._speed(tokens)
        while most and self._speed(tokens + sum(min(length, most) for length in lengths)) < least:
            most -= 1
        return most

    def _speed(self, tokens: int) -> float:
        """Return the prompt tokens per millisecond beside so many others."""
        tokens = max(tokens, self.decoding)
        prompts = self.times.prompt_tokens(tokens, self.limits.prefill_stretch, self.limits.prefill_rows)
        prompts = min(prompts, self.waiting)
        return prompts / self.times.step_ms(tokens + prompts)
