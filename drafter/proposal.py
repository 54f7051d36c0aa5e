"""Proposals of drafters without a model, with the acceptance that they expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from drafter.interface import DraftRequest, DraftResult


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft result with the number of its tokens that are expected to be accepted."""

    result: DraftResult
    expected: float


@runtime_checkable
class Proposer(Protocol):
    """Drafter whose drafts cost next to nothing, so that `blend` may discard them."""

    def propose(self, request: DraftRequest) -> Proposal:
        """Return what `draft` would return. The result depends only on the request and on the past."""
        ...
