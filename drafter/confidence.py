"""What a drafter without a model can say of its guess before it is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from drafter.interface import DraftRequest, DraftResult


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft, and how many of its tokens are expected to hold."""

    draft: DraftResult
    expected: float


@runtime_checkable
class Confident(Protocol):
    def propose(self, ask: DraftRequest) -> Proposal:
        """What `draft` would answer. A function of the ask and of the past alone, and for free."""
        ...
