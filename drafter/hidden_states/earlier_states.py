"""Hidden states as a session gets them: with commits, and earlier ones in pieces.

A drafter that reads the whole context begins with what the first verdict has, and guesses from that. Earlier states
wait here until they reach up to the first one that came. Then the drafter starts again from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocol.hidden_states.earlier_states import MAX_EARLIER_POSITIONS
from outrider.protocol.hidden_states.messages import MAX_HIDDEN_POSITIONS, HiddenStates

MAX_AWAITING = 2048  # positions that are kept while earlier ones are on their way
SHARE = 16  # of the KV cache's tokens, the part that the earlier states of one session may take


def earlier_positions(drafter: object, kv_tokens: int) -> int:
    """Return how many earlier positions a drafter asks for, if its attention reads the whole context."""
    return min(MAX_EARLIER_POSITIONS, kv_tokens // SHARE) if getattr(drafter, "reads_context", False) else 0


class StateQueue:
    """Hidden states of a session for its next request; up to `wanted` earlier positions may come."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.pending: list[HiddenStates] = []
        self._max_pending = MAX_HIDDEN_POSITIONS
        self._since: list[HiddenStates] = []  # everything since a gap, while earlier states may come
        self._earlier: list[HiddenStates] = []
        self._end = 0  # position after the last states

    def add(self, states: HiddenStates) -> None:
        """Add the states of a commit; without requests, keep only the newest positions."""
        self.pending.append(states)
        while _count(self.pending) > self._max_pending:
            self.pending.pop(0)
        if states.position != self._end:
            self._forget()
            self._since = [states] if self._wanted else []
        elif self._since:
            self._since.append(states)
            if _count(self._since) > MAX_AWAITING:
                self._forget()
        self._end = states.position + states.count

    def add_earlier(self, states: HiddenStates) -> None:
        """Add a piece of the earlier states. Pieces that leave a gap, or too many, are dropped with all before them."""
        if not self._since:
            return
        follows = not self._earlier or states.position == _end(self._earlier)
        self._earlier = [*self._earlier, states] if follows else [states]
        first = self._since[0].position
        if _end(self._earlier) > first or _count(self._earlier) > self._wanted:
            self._forget()
        elif _end(self._earlier) == first:
            self.pending = [*self._earlier, *self._since]
            self._max_pending = self._wanted + MAX_AWAITING
            self._forget()

    def take(self) -> tuple[HiddenStates, ...]:
        taken, self.pending = tuple(self.pending), []
        self._max_pending = MAX_HIDDEN_POSITIONS
        return taken

    def _forget(self) -> None:
        self._since, self._earlier = [], []


def _count(parts: Sequence[HiddenStates]) -> int:
    return sum(part.count for part in parts)


def _end(parts: Sequence[HiddenStates]) -> int:
    return parts[-1].position + parts[-1].count
