"""Hidden states of one session that its verdicts carry to drafters trained on the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.protocol.hidden_states.messages import HiddenStates

PROMPT_WINDOW = 256  # positions at the end of a prompt whose hidden states the first verdict carries


class HiddenStateBuffer:
    """Hidden states of the prompt, without gaps, until the next verdict carries them."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._parts: list[torch.Tensor] = []  # of consecutive positions  # [tokens, width] each

    def enable(self, enabled: bool) -> None:
        self.enabled = enabled
        if not enabled:
            self._parts.clear()

    def first_needed(self, cache_length: int, num_tokens: int, committed: int) -> int | None:
        """Return the first of `num_tokens` after the cached ones whose hidden state is needed; None: of none."""
        first = max(0, committed - PROMPT_WINDOW - cache_length)
        return first if first < num_tokens else None

    def add(self, states: torch.Tensor) -> None:
        """Add the states of a prompt chunk; the next states follow them."""
        if self.enabled:
            self._parts.append(states)

    def take(self, end: int, states: torch.Tensor) -> HiddenStates | None:
        """Return the buffered states and `states`, which end before position `end`, for a verdict."""
        if not self.enabled:
            return None
        joined = torch.cat([*self._parts, states])
        self._parts.clear()
        return HiddenStates(end - len(joined), joined.shape[-1], joined.numpy().tobytes())


def to_wire_format(states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy a step's states as float16 to the CPU, in one wait: the next step overwrites the engine's memory."""
    return torch.split(torch.cat(list(states)).to(torch.float16).cpu(), [len(each) for each in states])
