"""Length limits of request fields, for both protocols and all peers; a text without an entry has the limit OTHER."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from outrider.protocol.checks import MAX_ID_CHARACTERS, MAX_SALT_CHARACTERS, check_count
from outrider.protocol.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_CHARACTERS, MAX_STOP_IDS, MAX_STOP_STRINGS

OTHER = 256
# Characters of a text, bytes of binary data.
LONGEST: dict[str, int | None] = {
    "address": 255 + 6,  # a host name and a port
    "cache_salt": MAX_SALT_CHARACTERS,
    "data": 64 * 1024,  # a part of a projection
    "drafter": 64,
    "header": 1024,
    "idempotency_key": 256,
    "kind": 64,
    "model": 512,
    "name": 512,
    "role": 64,
    "session_id": MAX_ID_CHARACTERS,
    "stop": MAX_STOP_CHARACTERS,
    "tokens": 4096,  # the bytes of one entry of a vocabulary
    "worker_id": MAX_ID_CHARACTERS,
}
# None: their readers have limits of their own, in bytes.
LONGEST |= dict.fromkeys(("content", "json_schema", "lark", "payload", "prompt", "regex", "rows"))
# Entries of a list: a megabyte holds a million empty ones. Lists of texts and of messages with texts have the limit
# OTHER_MOST; the readers of other tokens and of guesses bound those lists.
MOST = {"eos_token_ids": 256, "rows": 1024, "headers": 16, "ms": 1024, "layers": 16, "specs": 64, "messages": 1000}
MOST |= {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_IDS, "logit_bias": MAX_LOGIT_BIAS, "tail": 1 << 22}
OTHER_MOST = 8192  # a part of a vocabulary
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    repeated: bool
    longest: int | None = None
    most: int | None = None
    message: bool = False  # with fields that have limits


def check_fields(message: Any, where: str = "") -> None:
    """Raise InvalidRequest for a text or list of a request that exceeds its limit; `where` is the message's place."""
    for field in _bounded_fields(message.DESCRIPTOR):
        place = where + field.name
        if field.message and not field.repeated:
            if message.HasField(field.name):
                check_fields(getattr(message, field.name), f"{place}.")
            continue
        content = getattr(message, field.name)
        if field.most is not None:
            check_count(place, len(content), field.most)
        if field.message:
            for index, one in enumerate(content):
                check_fields(one, f"{place}[{index}].")
        elif field.longest is not None and field.repeated:
            for index, text in enumerate(content):
                _check_text(f"{place}[{index}]", text, field.longest)
        elif field.longest is not None:
            _check_text(place, content, field.longest)


def _check_text(place: str, text: str | bytes, longest: int) -> None:
    check_count(place, len(text), longest, "bytes" if isinstance(text, bytes) else "characters")


@cache
def _bounded_fields(kind: Descriptor) -> tuple[_Field, ...]:
    """Return the fields with a limit, nested messages included. No message contains itself."""
    return tuple(field for one in kind.fields if (field := _field(one)) is not None)


def _field(one: FieldDescriptor) -> _Field | None:
    kind, repeated = one.message_type, one.is_repeated
    nested = kind is not None and not kind.GetOptions().map_entry and bool(_bounded_fields(kind))
    longest = LONGEST.get(one.name, OTHER) if one.type in _TEXTS else None
    usual = OTHER_MOST if nested or longest is not None else None
    most = MOST.get(one.name, usual) if repeated else None
    return _Field(one.name, repeated, longest, most, nested) if nested or longest or most else None
