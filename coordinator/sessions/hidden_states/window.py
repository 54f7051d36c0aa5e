"""Hidden states of a session's newest positions, kept for drafters that are attached later. Pure."""

from __future__ import annotations

from outrider.protocol.hidden_states.messages import HiddenStates

WINDOW = 256  # positions


class HiddenStateWindow:
    """Window of consecutive positions up to the newest one received."""

    def __init__(self) -> None:
        self._first = 0
        self._width = 0
        self._rows = bytearray()

    def clear(self) -> None:
        self._rows.clear()

    def add(self, states: HiddenStates) -> None:
        row_bytes = 2 * states.width
        if not row_bytes:
            return
        if states.width != self._width or states.position != self._first + len(self._rows) // row_bytes:
            # A gap: a new stream, or hidden states were switched off for a while.
            self._rows.clear()
            self._first, self._width = states.position, states.width
        self._rows += states.rows
        excess = len(self._rows) - WINDOW * row_bytes
        if excess > 0:
            del self._rows[:excess]
            self._first += excess // row_bytes

    def contents(self) -> HiddenStates | None:
        return HiddenStates(self._first, self._width, bytes(self._rows)) if self._rows else None
