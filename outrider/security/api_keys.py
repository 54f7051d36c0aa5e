"""API keys: read from a setting, compared with a caller's header.

gRPC metadata and HTTP headers have the same form, `authorization: Bearer KEY`. Keys are never logged or printed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.base.atomic_files import read_named
from outrider.protocol.errors import StartupError
from outrider.security.tenants import NO_TENANT, Tenant, TenantLimits

HEADER = "authorization"
_SCHEME = "bearer"
_NAME = re.compile(r"(?!key-)[A-Za-z0-9._-]{1,64}")
_ENTRY = "[NAME: ]KEY [requests_per_minute=N] [tokens_per_minute=N] [max_sessions=N] [priority=N] [best_priority=N]"
_AMOUNT = re.compile("[0-9]{1,12}")
_CLASS = re.compile("-?([0-9]{1,2}|100)")  # as a request may have: with another one, no session could be resumed


@dataclass(slots=True)
class _KeySet:
    """Keys of one setting. Fields are replaced as a whole, because other threads read them."""

    first: str
    holders: tuple[tuple[bytes, Tenant], ...]  # by the keys' digests


class ApiKeys:
    """Keys, each of which is accepted; none accepts all callers. A union with `|` follows changes of its parts."""

    def __init__(self, keys: Iterable[str] = (), holders: Sequence[Tenant] = ()) -> None:
        """Make a set; `holders` has one tenant per key, by default a separate one for each."""
        given = list(keys)
        held = dict(zip(given, holders or [Tenant.of_key(key) for key in given], strict=True))
        pairs = tuple((_digest(key), holder) for key, holder in held.items())
        self._key_sets: tuple[_KeySet, ...] = (_KeySet(given[0] if given else "", pairs),)

    @classmethod
    def parse(cls, text: str, field: str) -> ApiKeys:
        """Read `ENTRY,ENTRY`, or `@FILE` with one entry a line. Raise StartupError, which never quotes a key.

        An entry is a key, optionally with a name before it and limits after it:
        `web: KEY requests_per_minute=60 max_sessions=8`. Keys with the same name belong to one tenant.
        """
        if not (text := text.strip()):
            return cls()
        entries = _lines(text[1:], field) if text.startswith("@") else [entry.strip() for entry in text.split(",")]
        if not entries:
            # An empty file is an error: without keys every caller would be accepted.
            raise StartupError(f"{field}: {text[1:]} holds no key", field=field, value=text, limit="a key a line")
        keys: dict[str, Tenant] = {}
        holders: dict[str, Tenant] = {}
        for number, entry in enumerate(entries, start=1):
            key, holder = _entry(entry, f"{field}: key {number} of {len(entries)}", field)
            if holders.setdefault(holder.id, holder) != holder:
                message = f"{field}: the keys named {holder.id} have different limits"
                limit = "the same limits for keys of one name"
                raise StartupError(message, field=field, value=holder.id, limit=limit)
            keys[key] = holder
        return cls(keys, list(keys.values()))

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def __or__(self, other: ApiKeys) -> ApiKeys:
        either = ApiKeys()
        either._key_sets = self._key_sets + other._key_sets
        return either

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._pairs)})"

    def replace_by(self, other: ApiKeys) -> None:
        """Replace the keys by those of another set, for every user of this object."""
        (key_set,), (new,) = self._key_sets, other._key_sets
        key_set.holders, key_set.first = new.holders, new.first

    @property
    def _pairs(self) -> list[tuple[bytes, Tenant]]:
        return [pair for key_set in self._key_sets for pair in key_set.holders]

    @property
    def num_holders(self) -> int:
        return len({holder.id for _, holder in self._pairs})

    @property
    def first(self) -> str:
        """Return the key for outgoing calls; empty: none."""
        return next((key_set.first for key_set in self._key_sets if key_set.first), "")

    def shares(self, other: ApiKeys) -> bool:
        """Return whether both sets contain the same key."""
        return bool({digest for digest, _ in self._pairs} & {digest for digest, _ in other._pairs})

    def derived(self, purpose: bytes) -> list[bytes]:
        """Return a secret per key for this purpose only, the first key's first. It does not reveal the key."""
        return [hmac.digest(digest, purpose, "sha256") for digest, _ in self._pairs]

    def allows(self, header: str | bytes | None) -> bool:
        """Return whether an `authorization` header contains an accepted key."""
        return self.tenant_of(header) is not None

    def tenant_of(self, header: str | bytes | None) -> Tenant | None:
        """Return the tenant of an `authorization` header in constant time; None: key not accepted."""
        held = self._pairs
        if not held:
            return NO_TENANT
        text = header.decode("latin-1") if isinstance(header, bytes) else header or ""
        scheme, _, key = text.partition(" ")
        shown = _digest(key.strip())
        found: Tenant | None = None
        for digest, holder in held:
            if hmac.compare_digest(digest, shown):
                found = holder
        return found if scheme.lower() == _SCHEME else None


def bearer(key: str) -> str:
    """Return the value of the `authorization` header."""
    return f"Bearer {key}"


def _digest(key: str) -> bytes:
    """Return a digest, which has the same length for every key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _lines(path: str, field: str) -> list[str]:
    try:
        lines = read_named(field, path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise StartupError(f"{field}: cannot read {path}: not UTF-8 text", field=field, value=path) from error
    return [key for line in lines if (key := line.strip()) and not key.startswith("#")]


def _entry(entry: str, where: str, field: str) -> tuple[str, Tenant]:
    """Read one key with its name and its limits."""
    name, separator, rest = entry.partition(": ")
    if separator and not _NAME.fullmatch(name):
        message = f"{where} has an invalid name: 1 to 64 of A-Z a-z 0-9 . _ -, not beginning with key-"
        raise StartupError(message, field=field, limit=_ENTRY)
    key, *more = (rest if separator else entry).split(" ")
    if not key or not (entry.isascii() and entry.isprintable()):
        message = f"{where} is empty or has other characters than visible ASCII"
        raise StartupError(message, field=field, limit="visible ASCII")
    return key, Tenant.of_key(key, name if separator else "", _limits([word for word in more if word], where, field))


def _limits(words: Sequence[str], where: str, field: str) -> TenantLimits:
    given: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        form = _CLASS if name.endswith("priority") else _AMOUNT
        if name not in TenantLimits.__dataclass_fields__ or name in given or not form.fullmatch(number):
            raise StartupError(f"{where} has an invalid limit", field=field, limit=_ENTRY)
        given[name] = int(number)
    return TenantLimits(**given)
