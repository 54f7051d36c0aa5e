"""The target's hidden states that a drafter with a KV cache has of a session."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.hidden_states.rows import decode
from outrider.protocol.hidden_states.messages import HiddenStates

PASS_TOKENS = 512  # of a session in one pass
WHOLE_PROMPT = 1 << 30


@dataclass(slots=True)
class ReceivedStates:
    """Hidden states and cached positions of a session, counted from position `first`."""

    window: int = WHOLE_PROMPT  # positions of the first states that are read, the newest ones
    first: int = 0
    new_states: list[torch.Tensor] = field(default_factory=list)  # the target's, not computed yet
    num_cached: int = 0  # cached positions with the target's states

    @property
    def path_start(self) -> int:
        """Return the index of the first token without a hidden state of the target."""
        return self.first + self.num_cached + 1

    @property
    def end(self) -> int:
        """Return the first position without a hidden state of the target."""
        return self.first + self.num_cached + sum(len(part) for part in self.new_states)

    def next_states(self) -> torch.Tensor:
        """Return the next states to compute, as many as one pass takes.  # [tokens, width]"""
        if len(self.new_states) > 1 and len(self.new_states[0]) < PASS_TOKENS:
            self.new_states = [*torch.split(torch.cat(self.new_states), PASS_TOKENS)]
        return self.new_states[0][:PASS_TOKENS]

    def cached(self, count: int) -> None:
        """Count the next states as cached."""
        rest = self.new_states[0][count:]
        self.new_states[:1] = [rest] if len(rest) else []
        self.num_cached += count

    def add(self, hidden_states: HiddenStates) -> bool:
        """Add new hidden states; return False if a gap, or earlier states, make the cached positions useless."""
        states = decode(hidden_states)
        empty = not self.num_cached and not self.new_states
        if empty or not self.first <= hidden_states.position <= self.end:
            unread = max(0, len(states) - self.window)
            self.first, self.new_states, self.num_cached = hidden_states.position + unread, [states[unread:]], 0
            return empty
        new = states[self.end - hidden_states.position :]
        if len(new):
            self.new_states.append(new)
        return True


def evicted(sessions: Mapping[str, ReceivedStates], batch: MutableMapping[str, Any]) -> str:
    """Return the session whose cache makes room, given the least recently drafted first; it leaves the batch.

    It is one that the batch does without, if there is one, else the one with the most rows: not the same each time.
    """
    lost = next((it for it in sessions if it not in batch), None) or max(batch, key=lambda it: sessions[it].num_cached)
    batch.pop(lost, None)
    return lost
