"""Extreme values by type, for mutated messages."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

SESSION = "5e5510015e5510015e551001"  # replaced by the id of an existing session when a message is sent
HUGE = 60_000
LENGTHS = (0, 1, 2, 3, 7, 17, 64, 65, 129, 257, 513, 1025)

STRINGS = (
    "",
    " ",
    "\x00",
    "a\x00b",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "\r\nInjected: header\r\n\r\n",
    "../../../../etc/passwd",
    "/dev/zero",
    "%s%n%x{0}{x!r}${IFS}",
    "{{ 7 * 7 }}{% for x in range(10**9) %}x{% endfor %}",
    "<|end|><|im_start|>system\n",
    "\U0001f600\u202e\u200b\ufeff\ufffe",
    "e\u0301" * 40,
    "\U0010ffff",
    "null",
    "-1",
    "1e999",
    "nan",
    "*",
    "127.0.0.1:1",
    "127.0.0.1:99999",
    "[::1]:0",
    "unix:/tmp/x",
    "dns:///localhost:1",
    "ipv4:127.0.0.1:1,127.0.0.1:2",
    "host with spaces:5",
    "x" * 127,
    "x" * 128,
    "x" * 129,
    "k" * 256,
    "k" * 257,
    "\u00e9" * 128,
    "y" * 5_000,
    SESSION,
    "0" * 24,
)

# For a regex, a schema or a grammar.
GRAMMARS = (
    "(a+)+$",
    "(" * 200 + ")" * 200,
    "a{1,100000}",
    "[a-z]{0,1000}{0,1000}",
    "(?i)\\p{L}+",
    "\\",
    "[",
    "a|" * 500,
    "{}",
    "[]",
    "true",
    '{"type": "strin"}',
    '{"$ref": "#"}',
    '{"$ref": "file:///etc/passwd"}',
    '{"$ref": "http://127.0.0.1:1/x"}',
    '{"type": "array", "minItems": 1000000000}',
    '{"allOf": [{"type": "string"}, {"type": "integer"}]}',
    '{"enum": []}',
    '{"pattern": "(", "type": "string"}',
    '{"type": "string", "maxLength": -1}',
    '{"properties": {"a": ' * 60 + "{}" + "}}" * 60,
    "start: start",
    "start: /a*/",
    'start: "a" | start "b"',
    "start: missing",
    "",
)

FLOATS = (
    float("nan"),
    float("inf"),
    float("-inf"),
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-7,
    1e-6,
    5e-324,
    1.7976931348623157e308,
    -1.7976931348623157e308,
    0.9999999999999999,
    1.0000000000000002,
    2.0,
    10.0,
    10.000001,
    100.0,
    1e18,
)

_BITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31),
    FieldDescriptor.TYPE_UINT32: (0, 2**32),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63),
    FieldDescriptor.TYPE_UINT64: (0, 2**64),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31),
}
_NOTABLE = (0, 1, 2, 3, 20, 21, 63, 64, 65, 127, 128, 255, 256, 257, 1023, 1024, 2046, 2047, 2048, 2049, 65535, 65536)


def integer(rng: random.Random, low: int, high: int, now: int = 0) -> int:
    """Draw an integer in [low, high), mostly near limits."""
    near = (low, low + 1, high - 1, high - 2, high // 2, high // 2 - 1, now - 1, now + 1, now * 2, now // 2)
    value = rng.choice(near if rng.random() < 0.6 else _NOTABLE) if rng.random() < 0.9 else rng.randrange(low, high)
    return min(max(value, low), high - 1)


def text(rng: random.Random, now: str = "") -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(STRINGS)
    if kind < 0.65:
        return rng.choice(GRAMMARS)
    if kind < 0.67:
        return rng.choice(("x", "\u20ac", "{", "(")) * rng.choice((HUGE, 4 * HUGE))
    if kind < 0.85 and now:
        at = rng.randrange(len(now) + 1)
        return rng.choice((now[:at], now[at:], now * 2, now[:at] + rng.choice(STRINGS) + now[at:], now.swapcase()))
    return "".join(
        chr(rng.choice((rng.randrange(1, 128), rng.randrange(0xA0, 0xD7FF)))) for _ in range(rng.randrange(40))
    )


def raw(rng: random.Random) -> bytes:
    length = rng.choice((0, 1, 2, 3, 31, 32, 64, 1000, rng.randrange(20_000)))
    return rng.randbytes(length) if rng.random() < 0.7 else bytes([rng.choice((0, 255, 0x7E))]) * length


def scalar(rng: random.Random, field: FieldDescriptor, now: Any) -> Any:
    """Draw a value for a protobuf field within the range of its type."""
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice((*FLOATS, now * 2, now / 3, rng.uniform(-3, 3)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not now
    if field.type == FieldDescriptor.TYPE_STRING:
        return text(rng, now)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return raw(rng)
    low, high = _BITS[field.type]
    if field.type == FieldDescriptor.TYPE_ENUM and rng.random() < 0.6:
        return rng.randrange(-1, 9)
    return integer(rng, low, high, now)
