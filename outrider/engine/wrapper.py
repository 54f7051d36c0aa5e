"""The base of engines in front of another engine: each changes a few calls and passes the others on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.engine.interface import Engine, SessionTokens, StepResult
from outrider.protocol.fleet import ModelInfo


class EngineWrapper:
    """An engine that passes on to `inner` all that a subclass does not define."""

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
