"""Range checks that name the field, the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.protocol.errors import InvalidRequest

MAX_ID_CHARACTERS = 128
MAX_EPOCH = 10**15 - 1  # Redis counts exactly up to here
MAX_SALT_CHARACTERS = 256
MAX_IDS = 1 << 22  # of a vocabulary


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest unless every id exists in the target's vocabulary."""
    if tokens and max(tokens) >= vocab_size:
        index = next(i for i, token in enumerate(tokens) if token >= vocab_size)
        check_token(f"{name}[{index}]", tokens[index], vocab_size)


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    # A comparison with NaN is false, and integers too large for a float compare without an error.
    if low <= value <= high and not (open_low and value == low):
        return
    bracket = "(" if open_low else "["
    raise InvalidRequest.of(name, value, f"in {bracket}{_plain(low)}, {_plain(high)}]")


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):  # Python counts booleans as integers, JSON does not
        raise InvalidRequest.of(name, value, f"a whole number in [{low}, {high}]")
    check_number(name, value, low, high)


def _plain(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else str(limit)


def check_count(name: str, count: int, high: int, unit: str = "entries") -> None:
    if count > high:
        raise InvalidRequest.of(name, f"{count} {unit}", f"at most {high} {unit}")


def check_token(name: str, token: int, vocab_size: int | None) -> None:
    if vocab_size is not None and not 0 <= token < vocab_size:
        raise InvalidRequest.of(name, token, f"a token id in [0, {vocab_size - 1}]")
