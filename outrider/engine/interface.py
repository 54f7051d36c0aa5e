"""What a service asks of an engine. Not thread-safe: each service has one thread for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.protocol.fleet import ModelInfo
from outrider.speculation.tree_shape import TreeShape

CHAIN: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """New tokens of one session in a step.

    They follow the session's cached tokens. `parents[i]` is the index in
    `tokens` that token i hangs from, −1 for the cached prefix; empty means a
    chain. `logits_from` is the first row whose logits are wanted,
    `hidden_from` the first whose hidden state is (None: of none).
    `inputs` stand for what the model's own embeddings would give.
    """

    session: str
    tokens: Sequence[int]
    parents: Sequence[int] = CHAIN
    logits_from: int = 0
    hidden_from: int | None = None
    inputs: torch.Tensor | None = None  # [tokens, width]

    def depths(self) -> list[int]:
        """How far each row is past the cached prefix, from 0."""
        return [depth - 1 for depth in TreeShape.of(self.parents, len(self.tokens)).depths]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per Rows, in order: logits [rows wanted, vocab] and hidden states [rows wanted, width].

    `all_logits` are the logits of all of them in one tensor.
    """

    all_logits: torch.Tensor
    logits: list[torch.Tensor]
    hidden_states: list[torch.Tensor]


class Engine(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def capacity_tokens(self) -> int:
        """Room for tokens, all sessions all_logits."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Room that sessions hold."""
        ...

    @property
    def evictable_tokens(self) -> int:
        """Room that holds prefixes of ended sessions, given up when needed."""
        ...

    def length(self, session: str) -> int:
        """Tokens in this session's cache; 0 for a new one."""
        ...

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a session with what others under the same salt left of these tokens; how many that saves."""
        ...

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        """One forward pass over the new rows of several sessions; their keys and values stay cached.

        The result is good until the next call. Raises Overloaded when the cache is full.
        """
        ...

    def truncate(self, session: str, length: int) -> None:
        """Forget what comes after the first `length` tokens."""
        ...

    def compact(self, session: str, base: int, rows: Sequence[int]) -> None:
        """After extending from length `base`: keep only these rows, in order, as the cache's new end."""
        ...

    def fork(self, session: str, copy: str) -> None:
        """A second session with the same cached tokens."""
        ...

    def free(self, session: str) -> None:
        """Release a session's cache; unknown sessions are fine."""
        ...


def prefill(engine: Engine, session: str, tokens: Sequence[int], chunk: int = 512) -> torch.Tensor:
    """Cache `tokens` chunk by chunk; the logits after the last one.  # [vocab]"""
    logits = torch.empty(0)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits = engine.extend([SessionTokens(session, part, logits_from=len(part) - 1)]).logits[0][-1]
    return logits
