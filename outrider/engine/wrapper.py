"""The base of engines in front of another engine: each changes a few calls and passes the others on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.engine.interface import Engine, SessionTokens, StepResult
from outrider.protocol.fleet import ModelInfo


class EngineWrapper:
    """An engine that passes every call on to `inner`."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def capacity_tokens(self) -> int:
        return self.inner.capacity_tokens

    @property
    def cached_tokens(self) -> int:
        return self.inner.cached_tokens

    @property
    def evictable_tokens(self) -> int:
        return self.inner.evictable_tokens

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.inner.state_shape

    def length(self, session: str) -> int:
        return self.inner.length(session)

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return self.inner.match_prefix(session, tokens, salt)

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        return self.inner.extend(batch)

    def truncate(self, session: str, length: int) -> None:
        self.inner.truncate(session, length)

    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        self.inner.compact(session, base, indices)

    def free(self, session: str) -> None:
        self.inner.free(session)
