"""How fast steps are, and how much of a prompt one may carry without making others wait."""

from __future__ import annotations

from outrider.protocol.cost_curve import CostCurve

_SMOOTHING = 0.1
_PROMPT_SMOOTHING = 0.3
_FEWEST_PROMPT_ROWS = 8  # so that every prompt gets there


class Pace:
    """The curve measured at start, and how steps compare with it now.

    Steps with pieces of prompts are kept apart: their rows look back over
    more, and ever more as the prompt grows.
    """

    def __init__(self, measured: CostCurve) -> None:
        self._measured = measured
        self._plain = 1.0
        self._prompts = 1.0

    def curve(self) -> CostCurve:
        return self._measured.scaled(self._plain)

    @property
    def known(self) -> bool:
        return bool(self._measured.rows)

    def ms(self, rows: int) -> float:
        """What a step takes now."""
        return self._plain * self._measured.at(rows)

    def more_rows(self, rows: int, ms: float, most: int) -> int:
        """How many more may go with a step of `rows` that may take so much longer; beside nothing, that may take so
        long."""
        allowed_ms = (self._measured.at(rows) if rows else 0.0) + ms / self._plain
        return max(0, self._measured.tokens_within(allowed_ms, rows + most) - rows)

    def took(self, rows: int, ms: float, *, prompts: bool) -> None:
        if not self._measured.rows:
            return
        ratio = ms / self._measured.at(rows)
        if prompts:
            self._prompts += _PROMPT_SMOOTHING * (ratio - self._prompts)
        else:
            self._plain += _SMOOTHING * (ratio - self._plain)

    def prompt_rows(self, rows: int, stretch: float, most: int) -> int:
        """How many prompt tokens may go with a step of `rows` that is to take at most `stretch` times as long."""
        if not self._measured.rows:
            return most
        allowed_ms = stretch * self._plain * self._measured.at(rows) / max(self._prompts, self._plain)
        return max(_FEWEST_PROMPT_ROWS, self._measured.tokens_within(allowed_ms, rows + most) - rows)
