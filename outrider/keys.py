"""The keys that open a door: read from a setting, compared with what a caller shows.

One rule for both edges: gRPC's metadata and HTTP's header are the same
`authorization: Bearer KEY`. No key is ever logged or printed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from outrider.errors import StartupError

HEADER = "authorization"
_SCHEME = "bearer"


class Keys:
    """Any of them opens. Without any the door stands open."""

    __slots__ = ("_digests", "_first")

    def __init__(self, keys: Iterable[str] = ()) -> None:
        given = list(dict.fromkeys(keys))
        self._first = given[0] if given else ""
        self._digests = tuple(_digest(key) for key in given)

    @classmethod
    def parse(cls, text: str, field: str) -> Keys:
        """`KEY,KEY`, or `@FILE` with one key a line. Raises StartupError, which never quotes a key."""
        if not text.strip():
            return cls()
        keys = _lines(text[1:], field) if text.startswith("@") else [key.strip() for key in text.split(",")]
        if not keys:
            # Not the same as no setting: somebody wanted a locked door.
            raise StartupError(f"{field}: {text[1:]} holds no key", field=field, value=text, limit="a key a line")
        for number, key in enumerate(keys, start=1):
            if not key or " " in key or not (key.isascii() and key.isprintable()):
                raise StartupError(
                    f"{field}: key {number} of {len(keys)} is empty or has other characters than visible ASCII",
                    field=field,
                    limit="visible ASCII",
                )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __or__(self, other: Keys) -> Keys:
        either = Keys()
        either._first = self._first or other._first
        either._digests = self._digests + other._digests
        return either

    def __repr__(self) -> str:
        return f"Keys({len(self._digests)})"

    @property
    def first(self) -> str:
        """The one to show to others; empty: none."""
        return self._first

    def allows(self, header: str | bytes | None) -> bool:
        """Whether what a caller sent as `authorization` opens. The time it takes tells nothing of any key."""
        if not self._digests:
            return True
        text = header.decode("latin-1") if isinstance(header, bytes) else header or ""
        scheme, _, key = text.partition(" ")
        shown = _digest(key.strip())
        opens = False
        for digest in self._digests:
            opens |= hmac.compare_digest(digest, shown)
        return opens and scheme.lower() == _SCHEME


def bearer(key: str) -> str:
    """The header's value."""
    return f"Bearer {key}"


def _digest(key: str) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _lines(path: str, field: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise StartupError(f"{field}: cannot read {path}: {reason}", field=field, value=path) from error
    return [key for line in lines if (key := line.strip()) and not key.startswith("#")]
