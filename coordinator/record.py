"""What outlives a coordinator: the record of one session."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.messages import FinishReason, Grammar, SamplingParams, TokenKind, Verification

_KIND_SHIFT = 28
_TOKEN_MASK = (1 << _KIND_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Wish:
    """How a client wants its session speculated; None and empty leave it to the coordinator."""

    gamma: int | None = None
    patience_us: int | None = None
    drafter: str = ""
    branches: int | None = None
    ahead: bool | None = None


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request with everything resolved: tokens instead of text, a seed that is set."""

    prompt: tuple[int, ...]
    params: SamplingParams
    wish: Wish = Wish()
    cache_salt: str = ""

    def to_json(self) -> str:
        params = asdict(self.params)
        params["verification"] = self.params.mode.name
        params["logit_bias"] = [[token, bias] for token, bias in self.params.logit_bias.items()]
        return json.dumps(
            {"prompt": self.prompt, "params": params, "wish": asdict(self.wish), "cache_salt": self.cache_salt}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> SessionRequest:
        data: dict[str, Any] = json.loads(text)
        params = data["params"]
        params["verification"] = Verification[params["verification"]]
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"]}
        for name in ("stop", "stop_token_ids"):
            params[name] = tuple(params[name])
        params["grammar"] = Grammar(**params["grammar"]) if params.get("grammar") else None
        return cls(tuple(data["prompt"]), SamplingParams(**params), Wish(**data["wish"]), data.get("cache_salt", ""))


@dataclass(slots=True)
class SessionRecord:
    """`epoch` only grows; whoever holds the highest owns the session."""

    session_id: str
    request: SessionRequest
    epoch: int = 1
    tokens: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    model: str = ""  # the target's fingerprint
    verifier: str = ""  # where its cache was last

    @property
    def position(self) -> int:
        """Absolute, of the next token."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not FinishReason.NONE


def pack(tokens: Sequence[int], kinds: Sequence[TokenKind]) -> bytes:
    """Four bytes per token, its kind in the upper bits, so that a write at an offset can be repeated without harm."""
    words = [token | kind << _KIND_SHIFT for token, kind in zip(tokens, kinds, strict=True)]
    return struct.pack(f"<{len(words)}I", *words)


def unpack(data: bytes) -> tuple[list[int], list[TokenKind]]:
    words = struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])
    return [word & _TOKEN_MASK for word in words], [TokenKind(word >> _KIND_SHIFT) for word in words]
