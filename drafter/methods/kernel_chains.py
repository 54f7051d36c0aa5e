"""Chains of an eagle on the CPU: each is one call of the kernels, without a return to Python in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter.interface import DraftRequest
from outrider.engine.native import NativeEngine
from outrider.speculation.exponential_race import shared_key
from outrider.train.artifacts.eagle import Eagle

_PLACES = 1024  # for the tokens beyond the frequent ones that have come last


class KernelChains:
    """Continuations of sessions by likeliest tokens or shared draws. Each token's part of their input is made once."""

    def __init__(self, eagle: Eagle, engine: NativeEngine) -> None:
        self._engine = engine
        self._embeddings = eagle.embeddings
        self._mix, of_states = torch.split(eagle.mix.weight.detach(), eagle.shape.hidden, dim=1)
        self.ids: list[int] = eagle.ids.tolist()
        self._parts = torch.empty(len(self.ids) + _PLACES, eagle.shape.hidden)
        self._parts[: len(self.ids)] = self._part_of(eagle.ids)
        self._rows = {token: row for row, token in enumerate(self.ids)}
        self._tokens = dict(enumerate(self.ids))  # by row
        self._next = len(self.ids)
        self._chain = engine.prepare_chain(self._parts, of_states, eagle.ids)

    def extend(
        self, request: DraftRequest, states: torch.Tensor, tokens: Sequence[int], count: int
    ) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Compute tokens after the states before them; return `count` further ones, the last of those to be drafted.

        Return also the states and the logits from the last of `tokens` on.
        """
        rows = [self._rows.get(token) or self._row_of(token) for token in tokens]
        params, end = request.params, len(request.tokens) + request.max_new_tokens
        keys = [] if params.greedy else [shared_key(params, end - left) for left in range(count, 0, -1)]
        draws = (params.temperature, keys)
        found, computed = self._engine.chain(self._chain, request.session, states, rows, count, draws)
        return [self.ids[column] for column in found], computed.hidden_states[0].clone(), computed.logits[0].clone()

    def _row_of(self, token: int) -> int:
        """Return the row of a token's part; one that is not known takes the oldest place."""
        if token not in self._rows:
            row, self._next = self._next, self._next + 1
            if self._next == len(self._parts):
                self._next = len(self.ids)
            self._rows.pop(self._tokens.get(row, -1), None)
            self._parts[row] = self._part_of(torch.tensor(token))
            self._rows[token], self._tokens[row] = row, token
        return self._rows[token]

    def _part_of(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self._embeddings[tokens].to(self._mix), self._mix)
