"""A published drafter as the engine of `EagleDrafter`: KV caches of its sessions, and passes over several of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter.published.module import PublishedModule
from drafter.published.rows import DraftKvCache, RowBatch, SessionRows
from outrider.engine import SessionTokens, StepResult
from outrider.protocol.errors import Overloaded


class SessionCaches:
    """KV caches by session, of at most `capacity` rows together."""

    def __init__(self, module: PublishedModule, capacity: int) -> None:
        self._module = module
        self._capacity = capacity
        self._caches: dict[str, DraftKvCache] = {}

    def of(self, sessions: Sequence[str], new_rows: int) -> list[DraftKvCache]:
        """Return the caches of sessions that are about to get new rows. Raises Overloaded where these do not fit."""
        caches = [self._caches.setdefault(session, self._module.new_cache()) for session in sessions]
        used = sum(cache.length for cache in self._caches.values())
        if used + new_rows > self._capacity:
            raise Overloaded(
                f"the cache of {self._capacity} tokens is full", field="kv_tokens", value=used, limit=self._capacity
            )
        return caches

    def truncate(self, session: str, length: int) -> None:
        if session in self._caches:
            self._caches[session].truncate(length)

    def free(self, session: str) -> None:
        self._caches.pop(session, None)


class RowEngine(SessionCaches):
    """Passes of a drafter whose rows continue from hidden states. The states are the inputs of a pass."""

    def __init__(self, module: PublishedModule, capacity: int) -> None:
        super().__init__(module, capacity)
        self.ids = module.column_ids
        self.embeddings = module.embed_tokens.weight

    def inputs(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return states.to(self.embeddings)

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        """Append the rows of several sessions. Raises Overloaded when the caches are full."""
        counts = [len(each.tokens) for each in batch]
        caches = self.of([each.session for each in batch], sum(counts))
        parts = zip(caches, counts, (each.parents for each in batch), strict=True)
        device = self.embeddings.device
        rows = RowBatch([SessionRows(*part) for part in parts], device)
        tokens = torch.tensor([token for each in batch for token in each.tokens], device=device)
        states = torch.cat([each.input_embeddings for each in batch if each.input_embeddings is not None])
        outputs, following = self._module.step(rows, tokens, states)
        wanted = [part[each.logits_from :] for each, part in zip(batch, torch.split(outputs, counts), strict=True)]
        logits = self._module.logits(torch.cat(wanted)).float()
        kept = [part[each.hidden_from :] for each, part in zip(batch, torch.split(following, counts), strict=True)]
        return StepResult(logits, [len(part) for part in wanted], kept)
