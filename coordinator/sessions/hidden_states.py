"""The target's hidden states of a session's newest positions, for drafters that come later. Pure."""

from __future__ import annotations

from outrider.protocol.speculation import HiddenStates

WINDOW = 256  # positions


class HiddenStateWindow:
    """Without a gap, up to the newest that a verifier has sent."""

    def __init__(self) -> None:
        self._first = 0
        self._width = 0
        self._rows = bytearray()

    def clear(self) -> None:
        self._rows.clear()

    def add(self, features: HiddenStates) -> None:
        row = 2 * features.width
        if not row:
            return
        if features.width != self._width or features.position != self._first + len(self._rows) // row:
            # What is to follow does not: a new stream, or one that was steered off for a while.
            self._rows.clear()
            self._first, self._width = features.position, features.width
        self._rows += features.rows
        excess = len(self._rows) - WINDOW * row
        if excess > 0:
            del self._rows[:excess]
            self._first += excess // row

    def held(self) -> HiddenStates | None:
        return HiddenStates(self._first, self._width, bytes(self._rows)) if self._rows else None
