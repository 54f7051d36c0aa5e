"""The interface between services and engines. Not thread-safe: each service calls its engine from one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from outrider.protocol.fleet import ModelInfo


class SessionTokens(NamedTuple):
    """New tokens of one session in a step.

    They follow the session's cached tokens. `parents[i]` is the index in `tokens` that token i hangs from, −1 for the
    cached prefix; empty means a chain. Logits are computed from token `logits_from` on, hidden states from
    `hidden_from` on (None: for no token). `input_embeddings` replace the model's own embeddings of `tokens`.
    """

    session: str
    tokens: Sequence[int]
    parents: Sequence[int] = ()
    logits_from: int = 0
    hidden_from: int | None = None
    input_embeddings: torch.Tensor | None = None  # [tokens, width]
    layers: Sequence[int] = ()  # after which hidden states are needed too, from `hidden_from` on


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits [tokens requested, vocab] and hidden states [tokens requested, width] per SessionTokens, in order.

    `all_logits` holds the logits of all of them in one tensor. A row of hidden states is the final one, and behind it
    those after each of `layers`.
    """

    all_logits: torch.Tensor
    counts: Sequence[int]
    hidden_states: list[torch.Tensor]
    layers: tuple[int, ...] = ()  # of all sessions, ascending

    @property
    def logits(self) -> list[torch.Tensor]:
        return list(torch.split(self.all_logits, list(self.counts)))


class Engine(Protocol):
    """A model with the KV caches of many sessions."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def capacity_tokens(self) -> int:
        """Return the cache capacity in tokens, over all sessions."""

    @property
    def evictable_tokens(self) -> int:
        """Return the capacity that evictable cached blocks occupy, in tokens."""

    @property
    def state_shape(self) -> tuple[int, int]:
        """Return how many decoder layers it captures states of, and their width."""

    def length(self, session: str) -> int:
        """Return the number of tokens in a session's cache; 0 for a new one."""

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a session with the cached blocks of the same tokens and salt; return the number of tokens found."""

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        """Run one pass over new tokens and cache them, or raise Overloaded; the result is valid until the next call."""

    def truncate(self, session: str, length: int) -> None:
        """Drop the tokens after the first `length` from a session's cache."""

    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        """Keep, of the tokens cached after length `base`, those at `indices`, in this order."""

    def free(self, session: str) -> None:
        """Release a session's cache; unknown sessions are accepted."""


class EngineWrapper:
    """The base of engines in front of another one: it passes on to `inner` all that a subclass does not define."""

    info: ModelInfo
    device: torch.device
    capacity_tokens: int
    evictable_tokens: int
    state_shape: tuple[int, int]
    length: Callable[[str], int]
    match_prefix: Callable[..., int]
    truncate: Callable[[str, int], None]
    compact: Callable[[str, int, Sequence[int]], None]
    free: Callable[[str], None]
    extend: Callable[[Sequence[SessionTokens]], StepResult]

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def prefill(engine: Engine, session: str, tokens: Sequence[int], chunk: int = 512) -> torch.Tensor:
    """Cache `tokens` chunk by chunk, and return the logits after the last one.  # [vocab]"""
    logits = torch.empty(0)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits = engine.extend([SessionTokens(session, part, logits_from=len(part) - 1)]).logits[0][-1]
    return logits
