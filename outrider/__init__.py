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

# Loaded on first use: `import outrider.protocol` must load neither gRPC nor torch.
_HOMES = {
    "outrider.client.aio": ("AsyncClient",),
    "outrider.client.events": ("Finished", "Generation", "Options", "Reply", "Started", "Tokens"),
    "outrider.client.sync": ("DEFAULT_ENDPOINT", "Client"),
    "outrider.protocol.sampling_params": ("Grammar", "SamplingParams", "Verification"),
    "outrider.protocol.speculation": ("FinishReason", "TokenKind", "TokenLogprobs"),
    "outrider.protocol.statistics": ("DrafterStats", "GenerationStats", "PlanStats", "ServerInfo"),
    "outrider.security.tls": ("Tls",),
}
_HOME_OF = dict.fromkeys(__all__, "outrider.protocol.errors")  # of all others
_HOME_OF |= {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
