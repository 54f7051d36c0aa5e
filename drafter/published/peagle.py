"""P-EAGLE: an EAGLE-3 drafter that guesses several tokens in one pass.

The rows after the first one have the mask token, and a learned row in the place of the target's states.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from drafter.published.checkpoint_config import CheckpointConfig
from drafter.published.eagle3 import PublishedEagle3


class PublishedPeagle(PublishedEagle3):
    """A P-EAGLE drafter; `step` with the rows of `masks` guesses ahead."""

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        super().__init__(config, names)
        self._mask_token = config.integer("mask_token_id", at_least=0, at_most=self.needs.vocab - 1)
        width = self.needs.states * self.needs.hidden
        self.mask_hidden = nn.Parameter(torch.empty(1, width, device="meta"))

    def masks(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and hidden states of rows that stand for tokens not yet known."""
        tokens = torch.full((count,), self._mask_token, device=self.mask_hidden.device)
        return tokens, self.project(self.mask_hidden).expand(count, -1)
