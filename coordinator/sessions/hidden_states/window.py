"""Hidden states of a session's newest positions, kept for drafters that are attached later. Pure."""

from __future__ import annotations

from dataclasses import replace

from outrider.protocol.hidden_states.messages import HiddenStates

WINDOW = 256  # positions


class HiddenStateWindow:
    """Window of consecutive positions up to the newest one received."""

    def __init__(self) -> None:
        self._first = 0
        self._newest: HiddenStates | None = None  # how the rows are to be read
        self._rows = bytearray()

    def add(self, states: HiddenStates) -> None:
        known, row_bytes = self._newest, states.row_bytes
        same = known is not None and (known.width, known.float8) == (states.width, states.float8)
        if not same or states.position != self._first + len(self._rows) // row_bytes:
            # A gap: a new stream, or hidden states were switched off for a while.
            self._rows.clear()
            self._first = states.position
        self._newest = states
        self._rows += states.rows
        excess = len(self._rows) - WINDOW * row_bytes
        if excess > 0:
            del self._rows[:excess]
            self._first += excess // row_bytes

    def contents(self) -> HiddenStates | None:
        if self._newest is None or not self._rows:
            return None
        return replace(self._newest, position=self._first, rows=bytes(self._rows))
