"""Chains of an eagle on the CPU: each is one call of the kernels, without a return to Python in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter.interface import DraftRequest
from outrider.engine.native import NativeEngine
from outrider.speculation.exponential_race import shared_key
from outrider.train.artifacts.eagle import Eagle

_PLACES = 1024  # for tokens that are not drafted, the latest ones


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
        self._recent_rows: dict[int, int] = {}  # of the other tokens, least recently used first
        self._chain = engine.prepare_chain(self._parts, of_states, eagle.ids)

    def extend(
        self, request: DraftRequest, states: torch.Tensor, tokens: Sequence[int]
    ) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Compute the request's last tokens after the states before them; return as many more as it has room for.

        Return also the states and the logits from the last of `tokens` on.
        """
        rows = [self._rows[token] if token in self._rows else self._recent_row(token) for token in tokens]
        params, first, room = request.params, len(request.tokens), request.room
        keys = [] if params.greedy else [shared_key(params, position) for position in range(first, first + room)]
        found, result = self._engine.chain(self._chain, request.session, states, rows, room, (params.temperature, keys))
        return [self.ids[column] for column in found], result.hidden_states[0].clone(), result.logits[0].clone()

    def _recent_row(self, token: int) -> int:
        """Return the row of a token's part; a new token takes that of the least recently used one."""
        row = self._recent_rows.pop(token, None)
        if row is None:
            part = self._part_of(torch.tensor(token))
            row = len(self.ids) + len(self._recent_rows)
            if row == len(self._parts):
                row = self._recent_rows.pop(next(iter(self._recent_rows)))
            self._parts[row] = part
        self._recent_rows[token] = row
        return row

    def _part_of(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self._embeddings[tokens].to(self._mix), self._mix)
