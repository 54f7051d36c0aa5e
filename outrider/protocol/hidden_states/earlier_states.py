"""Request of hidden states of positions before those that were sent."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.checks import check_number

MAX_EARLIER_POSITIONS = 16_384  # of a session


@dataclass(frozen=True, slots=True)
class EarlierStates:
    """Positions whose states are asked for; see EarlierStates in common.proto."""

    number: int
    position: int
    end: int

    def check(self) -> None:
        low, high = self.position + 1, self.position + MAX_EARLIER_POSITIONS
        check_number("steer.earlier_states.end", self.end, low, high)
