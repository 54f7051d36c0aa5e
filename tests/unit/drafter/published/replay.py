"""Runs of a published drafter over a schedule of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafter.published.loading import PublishedCheckpoint
from drafter.published.rows import RowBatch, SessionRows
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from tests.published import Call, previous_tokens, target_embeddings


class Replay:
    """Our drafter of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        matrices = EmbeddingsAndHead(target_embeddings(), target_embeddings(), None, 0.0)
        self._module: Any = PublishedCheckpoint.open(checkpoint).load(matrices)
        self._cache = self._module.new_cache()
        self._hidden = torch.empty(0)
        self.ids = self._module.ids

    @torch.no_grad()
    def run(self, call: Call) -> torch.Tensor:
        """Return the logits of the call's rows."""
        self._cache.truncate(call.cut)
        tokens = call.tokens
        if hasattr(self._module, "block"):
            return self._block(call)
        hidden = self._hidden[-1:] if call.states is None else self._module.project(call.states)
        if call.masks:
            masks, unknown = self._module.masks(call.masks)
            tokens, hidden = torch.cat([tokens, masks]), torch.cat([hidden, unknown])
        output, self._hidden = self._module.step(self._rows(len(tokens)), tokens, hidden)
        return self._logits(output)

    def _rows(self, count: int) -> RowBatch:
        return RowBatch([SessionRows(self._cache, count)], torch.device("cpu"))

    def _logits(self, output: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._module.logits(output)
        return logits

    def _block(self, call: Call) -> torch.Tensor:
        """Commit the states, and guess a block after the last of the tokens; the draws that DSpark sees are its own."""
        assert call.states is not None
        self._module.commit(self._rows(len(call.states)), self._module.project(call.states))
        (hidden,) = self._module.block([self._cache], [int(call.tokens[-1])])
        logits = self._logits(hidden)
        assert self._cache.length == call.cut + len(call.states)
        assert len(logits) == call.masks + self._module.from_anchor
        if not hasattr(self._module, "markov"):
            return logits
        previous = previous_tokens(call, len(logits))
        confidence = self._module.confidence(hidden, previous)
        state = torch.zeros(1, self._module.markov_head.state_width)
        for place in range(len(logits)):
            state, bias = self._module.markov(state, previous[place, None], hidden[place, None])
            logits[place] += bias[0]
        return torch.cat([logits, confidence[:, None]], dim=-1)
