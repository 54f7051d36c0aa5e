"""One session's hidden states on their way into its verdicts, for drafters that build on the target's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.protocol.speculation import HiddenStates

FEATURE_WINDOW = 256  # positions at the end of a prompt whose hidden states go with the first verdict


class HiddenStateBuffer:
    """Rows of the prompt are kept until there is a verdict to carry them; they are always without a gap."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._kept: list[torch.Tensor] = []  # of consecutive positions  # [rows, width] each

    def steer(self, wanted: bool) -> None:
        self.wanted = wanted
        if not wanted:
            self._kept.clear()

    def wanted_from(self, cached: int, rows: int, committed: int) -> int | None:
        """First of the `rows` after the `cached` tokens whose hidden state is to be kept; None: of none."""
        first = max(0, committed - FEATURE_WINDOW - cached)
        return first if self.wanted and first < rows else None

    def keep(self, rows: torch.Tensor) -> None:
        """Of a piece of the prompt: what comes next in the session follows it."""
        if self.wanted:
            self._kept.append(rows)

    def take(self, end: int, rows: torch.Tensor) -> HiddenStates | None:
        """What goes with a verdict: `rows` end before position `end`, and what was kept comes before them."""
        if not self.wanted:
            return None
        together = torch.cat([*self._kept, rows])
        self._kept.clear()
        return HiddenStates(end - len(together), together.shape[-1], together.numpy().tobytes())


def as_sent(rows: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    """The chosen rows as they go over the wire: float16, out of the engine's memory, which the next step uses again."""
    return rows[torch.tensor(chosen, dtype=torch.long, device=rows.device)].to(torch.float16).cpu()
