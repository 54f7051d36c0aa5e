"""Session record: the state of a session that outlives its coordinator."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from coordinator.control.gamma import FixedChoices
from outrider.protocol.checks import check_tokens, check_whole
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fieldwise import KEY, from_plain, to_plain
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import (
    MAX_BRANCHES,
    MAX_DRAFT_WAIT_US,
    MAX_GAMMA,
    FinishReason,
    TokenKind,
    TokenLogprobs,
)

MAX_PRIORITY = 100
_KIND_SHIFT = 28
_TOKEN_MASK = (1 << _KIND_SHIFT) - 1
_KINDS = {int(kind): kind for kind in TokenKind}


@dataclass(frozen=True, slots=True)
class SpeculationOptions(FixedChoices):
    """Speculation settings of a request."""

    def check(self) -> None:
        """Raise InvalidRequest for values that no API accepts."""
        for name, value, low, high in (
            ("gamma", self.gamma, 0, MAX_GAMMA),
            ("patience_us", self.patience_us, 0, MAX_DRAFT_WAIT_US),
            ("branches", self.branches, 1, MAX_BRANCHES),
        ):
            if value is not None:
                check_whole(f"speculation.{name}", value, low, high)
        _check_type("speculation.drafter", str, self.drafter)
        _check_type("speculation.ahead", bool | None, self.ahead)


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request with everything resolved: tokens instead of text, and a seed."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationOptions = field(default=SpeculationOptions(), metadata={KEY: "wish"})
    cache_salt: str = ""
    drawn_seed: bool = field(default=False, compare=False, metadata={KEY: ""})  # the client gave none; not stored
    sent: str = field(default="", compare=False, metadata={KEY: ""})  # digest of what the client sent; not stored
    priority: int | None = field(default=None, compare=False)  # class; None: not begun, or by an earlier version

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in to_plain(self).items() if value is not None})

    @classmethod
    def from_json(cls, text: str | bytes) -> SessionRequest:
        """Read a stored request. Fields of newer versions are ignored, so that the session can continue."""
        return from_plain(cls, from_json(text))  # which refuses half a character, unlike `json`

    def check(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequest, or what comparing wrong types raises, for values that no API accepts."""
        if not self.prompt:
            raise InvalidRequest.of("prompt", "empty", "at least one token")
        _check_whole("prompt", *self.prompt)
        if vocab_size is not None:
            check_tokens("prompt", self.prompt, vocab_size)
        params = self.params
        if params.seed is None:
            raise InvalidRequest.of("params.seed", "absent", "a number")
        params.check(vocab_size)
        _check_whole("params.stop_token_ids", *params.stop_token_ids)
        _check_type("params.ignore_eos", bool, params.ignore_eos)
        _check_type("params.stop", str, *params.stop)
        if params.grammar is not None:
            _check_type("params.grammar", str, params.grammar.json_schema, params.grammar.regex, params.grammar.lark)
            _check_type("params.grammar.json_object", bool, params.grammar.json_object)
        _check_type("cache_salt", str, self.cache_salt)
        if self.priority not in (None, *range(-MAX_PRIORITY, MAX_PRIORITY + 1)):
            raise InvalidRequest.of("priority", self.priority, f"in [{-MAX_PRIORITY}, {MAX_PRIORITY}]")
        self.speculation.check()


@dataclass(slots=True)
class SessionRecord:
    """Stored state of a session. The coordinator with the highest `epoch` owns it."""

    session_id: str
    request: SessionRequest
    epoch: int = 1
    tokens: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # per token, if requested
    finish_reason: FinishReason = FinishReason.NONE
    model: str = ""  # the identity of its target, see `Target`
    verifier: str = ""  # the last one, whose prefix cache may still match
    tenant: str = ""
    guessed: bool = False  # the epoch: Redis did not answer the claim that may have counted it on

    def append(self, tokens: Sequence[int], kinds: Sequence[TokenKind], known: Sequence[TokenLogprobs | None]) -> None:
        """Add output tokens; `known` has one entry per token if they were requested, else none."""
        self.tokens += tokens
        self.kinds += kinds
        self.logprobs += known

    def cut(self, length: int) -> None:
        """Drop output tokens from `length` on."""
        for kept in (self.tokens, self.kinds, self.logprobs):
            del kept[length:]

    @property
    def position(self) -> int:
        """Return the absolute position of the next token."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not FinishReason.NONE


def pack(tokens: Sequence[int], kinds: Sequence[TokenKind]) -> bytes:
    """Pack each token into four bytes, its kind in the upper bits, so that a write at an offset can be repeated."""
    words = [token | kind << _KIND_SHIFT for token, kind in zip(tokens, kinds, strict=True)]
    return struct.pack(f"<{len(words)}I", *words)


def unpack(data: bytes) -> tuple[list[int], list[TokenKind]]:
    """Return tokens and kinds. Kinds of newer versions become plain."""
    words = struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])
    return [word & _TOKEN_MASK for word in words], [_KINDS.get(word >> _KIND_SHIFT, TokenKind.PLAIN) for word in words]


def logprobs_size(top: int) -> int:
    """Return the size of an entry in bytes, equal for all tokens of a session."""
    return struct.calcsize(f"<Bd{top}I{top}d")


def pack_logprobs(entries: Sequence[TokenLogprobs | None], top: int) -> bytes:
    """Pack entries of equal size: number of alternatives plus one (0: no entry), then the numbers."""
    packed = []
    for entry in entries:
        if entry is None:
            packed.append(bytes(logprobs_size(top)))
            continue
        count = min(top, len(entry.top_ids))
        ids = [*entry.top_ids[:count], *[0] * (top - count)]
        values = [*entry.top_logprobs[:count], *[0.0] * (top - count)]
        packed.append(struct.pack(f"<Bd{top}I{top}d", count + 1, entry.logprob, *ids, *values))
    return b"".join(packed)


def unpack_logprobs(data: bytes, top: int) -> list[TokenLogprobs | None]:
    size = logprobs_size(top)
    entries: list[TokenLogprobs | None] = []
    for start in range(0, len(data) - size + 1, size):
        marked, logprob, *rest = struct.unpack_from(f"<Bd{top}I{top}d", data, start)
        count = min(top, marked - 1)
        known = TokenLogprobs(logprob, tuple(rest[:count]), tuple(rest[top : top + count]))
        entries.append(known if marked else None)
    return entries


def _check_whole(name: str, *values: Any) -> None:
    """Raise InvalidRequest for what `check_whole` refuses, and for negative numbers."""
    for value in values:
        if type(value) is not int or value < 0:
            raise InvalidRequest.of(name, value, "a whole number")


def _check_type(name: str, wanted: Any, *values: Any) -> None:
    for value in values:
        if not isinstance(value, wanted):
            raise InvalidRequest.of(name, value, str(getattr(wanted, "__name__", wanted)))
