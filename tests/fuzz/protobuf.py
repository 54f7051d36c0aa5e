"""Mutations of protobuf messages: of their structure, by descriptors, and of their bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz import values

_SIZES = (*values.LENGTHS, 5_000, 70_000)
_SIZE_ODDS = (*(1.0,) * len(values.LENGTHS), 0.1, 0.03)
_LENGTH_DELIMITED = 2


def mutate(rng: random.Random, message: Message, times: int) -> None:
    """Change a message in `times` places."""
    for _ in range(times):
        places = list(_messages(message))
        place = rng.choice(places)
        fields = place.DESCRIPTOR.fields
        present = [field for field, _ in place.ListFields()]
        field = rng.choice(present if present and rng.random() < 0.7 else fields) if fields else None
        if field is not None:
            _change(rng, place, field)


def encoded(message: Message) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _messages(message: Message, depth: int = 0) -> Iterator[Message]:
    """Yield a message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE or depth > 4 or _is_map(field):
            continue
        for each in value[:4] if field.is_repeated else (value,):
            yield from _messages(each, depth + 1)


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _change(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif _is_map(field):
        _change_map(rng, getattr(message, field.name), field)
    elif field.is_repeated:
        _change_list(rng, getattr(message, field.name), field)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        _change_message(rng, getattr(message, field.name))
    else:
        setattr(message, field.name, values.scalar(rng, field, getattr(message, field.name)))


def _change_message(rng: random.Random, message: Message) -> None:
    """Set an absent message, empty or filled; within a oneof this clears another field."""
    message.SetInParent()  # type: ignore[attr-defined,unused-ignore]
    if message.DESCRIPTOR.fields and rng.random() < 0.7:
        _change(rng, message, rng.choice(message.DESCRIPTOR.fields))


def _change_map(rng: random.Random, entries: Any, field: FieldDescriptor) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(rng.choice((1, 1, 2, 1025, 1026))):
        entries[values.scalar(rng, key, 0)] = values.scalar(rng, value, 0.0)


def _change_list(rng: random.Random, items: Any, field: FieldDescriptor) -> None:
    now = list(items)
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if not now or rng.random() < 0.4:
        if is_message:
            added = items.add()
            _change_message(rng, added)
        elif now and rng.random() < 0.6:
            items[rng.randrange(len(now))] = values.scalar(rng, field, rng.choice(now))
        else:
            items.append(values.scalar(rng, field, now[-1] if now else field.default_value or _zero(field)))
        return
    changed = rng.choice(_ORDERS)(rng, now)
    copies = [type(each).FromString(each.SerializeToString()) for each in changed] if is_message else changed
    del items[:]
    items.extend(copies)


def _zero(field: FieldDescriptor) -> Any:
    return {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}.get(field.type, 0)


def _many(rng: random.Random, items: list[Any]) -> list[Any]:
    size = rng.choices(_SIZES, _SIZE_ODDS)[0]
    return [items[i % len(items)] for i in range(size)]


def _without(rng: random.Random, items: list[Any]) -> list[Any]:
    at = rng.randrange(len(items))
    return items[:at] + items[at + 1 :]


def _twice(rng: random.Random, items: list[Any]) -> list[Any]:
    return [*items, rng.choice(items)]


def _shuffled(rng: random.Random, items: list[Any]) -> list[Any]:
    return rng.sample(items, len(items))


_ORDERS: Sequence[Callable[[random.Random, list[Any]], list[Any]]] = (_many, _without, _twice, _shuffled)


# Streams.


def reorder(rng: random.Random, messages: list[bytes]) -> list[bytes]:
    """Change the sequence: drop, duplicate, move or repeat one message."""
    return rng.choice((*_ORDERS[1:], _flood))(rng, messages) if messages else messages


def _flood(rng: random.Random, items: list[bytes]) -> list[bytes]:
    one = rng.choice(items)
    return [*items, *[one] * (rng.choice((10, 100)) if len(one) < 2_000 else 3)]


# Bytes.


def spoil(rng: random.Random, data: bytes) -> bytes:
    """Mutate encoded bytes: truncate, garble, add unknown fields."""
    return rng.choice(_SPOILERS)(rng, data)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _garble(rng: random.Random, data: bytes) -> bytes:
    garbled = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if garbled else 0):
        garbled[rng.randrange(len(garbled))] = rng.choice((0, 0x80, 0xFF, rng.randrange(256)))
    return bytes(garbled)


def _splice(rng: random.Random, data: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + rng.choice((b"", data[start:end] * 2, rng.randbytes(rng.randrange(1, 9)))) + data[end:]


def _unknown(rng: random.Random, data: bytes) -> bytes:
    number = rng.choice((15, 99, 18_999, 19_001, 2**29 - 1))
    field = {
        0: varint(rng.choice((0, 1, 2**64 - 1))),
        1: rng.randbytes(8),
        2: varint(5) + b"hello",
        5: rng.randbytes(4),
    }
    kind = rng.choice(tuple(field))
    return data + varint(number << 3 | kind) + field[kind]


def _wrong_type(rng: random.Random, data: bytes) -> bytes:
    """Append a field with a known number and another wire type."""
    number = rng.randrange(1, 17)
    return data + rng.choice(
        (
            varint(number << 3) + varint(rng.choice((0, 2**31, 2**64 - 1))),
            varint(number << 3 | 1) + rng.randbytes(8),
            varint(number << 3 | 2) + varint(3) + rng.choice((b"\xff\xfe\xfd", b"abc", b"\x0a\x01\x61")),
            varint(number << 3 | 5) + rng.randbytes(4),
            varint(number << 3 | 3) + varint(number << 3 | 4),  # a group
            varint(number << 3 | 3),  # that does not end
            varint(number << 3 | 6),
        )
    )


def _no_text(rng: random.Random, data: bytes) -> bytes:
    """Overwrite bytes with invalid UTF-8; lengths of fields stay."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\xc3\x28", b"\xf8\x88\x80\x80\x80")) + data[at + 2 :]


def _nested(rng: random.Random, data: bytes) -> bytes:
    """Nest messages deeper than parsers allow."""
    tag = varint(rng.randrange(1, 5) << 3 | _LENGTH_DELIMITED)
    for _ in range(rng.choice((5, 99, 101, 500))):
        data = tag + varint(len(data)) + data
    return data


def _merged(rng: random.Random, data: bytes) -> bytes:
    return data * rng.choice((2, 3, 50) if len(data) < 5_000 else (2,))


def _overlong(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice(
        (b"\x80" * 11 + b"\x01", b"\x0a" + b"\xff" * 9 + b"\x01", b"\x0a\xff\xff\xff\xff\x07", b"\x00")
    )


def _noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((1, 2, 5, 40, 1000, 30_000)))


_SPOILERS: Sequence[Callable[[random.Random, bytes], bytes]] = (
    _cut,
    _garble,
    _garble,
    _splice,
    _unknown,
    _wrong_type,
    _no_text,
    _nested,
    _merged,
    _overlong,
    _noise,
)


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        if not value:
            return bytes([*out, low])
        out.append(low | 0x80)
