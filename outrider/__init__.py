"""Outrider: disaggregated, lossless speculative decoding. Everything public is importable from here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client.aio import AsyncClient
    from outrider.client.events import Finished, Generation, Options, Reply, Started, Tokens
    from outrider.client.sync import DEFAULT_ENDPOINT, Client
    from outrider.protocol.errors import (
        Conflict,
        Expired,
        Fenced,
        InvalidRequest,
        ModelMismatch,
        NotFound,
        OutriderError,
        Overloaded,
        PeerLost,
        StartupError,
        Unauthenticated,
        Unavailable,
    )
    from outrider.protocol.sampling_params import Grammar, SamplingParams, Verification
    from outrider.protocol.speculation import FinishReason, TokenKind, TokenLogprobs
    from outrider.protocol.statistics import DrafterStats, GenerationStats, PlanStats, ServerInfo
    from outrider.security.tls import Tls

__all__ = [
    "DEFAULT_ENDPOINT",
    "AsyncClient",
    "Client",
    "Conflict",
    "DrafterStats",
    "Expired",
    "Fenced",
    "FinishReason",
    "Finished",
    "Generation",
    "GenerationStats",
    "Grammar",
    "InvalidRequest",
    "ModelMismatch",
    "NotFound",
    "Options",
    "OutriderError",
    "Overloaded",
    "PeerLost",
    "PlanStats",
    "Reply",
    "SamplingParams",
    "ServerInfo",
    "Started",
    "StartupError",
    "Tls",
    "TokenKind",
    "TokenLogprobs",
    "Tokens",
    "Unauthenticated",
    "Unavailable",
    "Verification",
]

# Loaded on first use, and in this order: `import outrider.protocol` must load neither gRPC nor torch.
_HOMES: tuple[str, ...] = ("protocol.errors", "protocol.sampling_params", "protocol.speculation", "protocol.statistics")
_HOMES += ("security.tls", "client.sync", "client.aio")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (importlib.import_module(f"outrider.{home}") for home in _HOMES)
    return next(vars(home)[name] for home in homes if name in vars(home))


def __dir__() -> list[str]:
    return sorted(__all__)
