"""Escapes that make untrusted text safe for terminals, logs and headers."""

from __future__ import annotations

from typing import Any

# Bidirectional marks: they can make a line read as another.
_DIRECTIONS = frozenset({0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)})


def printable(text: Any) -> str:
    """Return the text with control characters escaped, because a terminal executes them."""
    return "".join(map(_shown, str(text)))


def _shown(character: str) -> str:
    code = ord(character)
    if code in (9, 10) or 32 <= code < 127 or (code >= 160 and not 0xD800 <= code < 0xE000 and code not in _DIRECTIONS):
        return character
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
