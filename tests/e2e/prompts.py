"""Prompts of every kind that has ever broken something, and the sampling parameters to try on them."""

from __future__ import annotations

import random

_SENTENCES = (
    "The lighthouse keeper counted the ships that passed in the night.",
    "Speculative decoding drafts several tokens and verifies them at once.",
    "Rain fell on the tin roof while the old clock struck four.",
    "Prices rose by 3.5 % in May; wages did not.",
    "Ask not what the cache can do for you.",
)
_CODE = (
    "def add(a, b):\n    return a + b\n\n",
    "for (int i = 0; i < n; i++) {\n\tsum += x[i];\n}\n",
    "SELECT name, COUNT(*) FROM users GROUP BY name;\n",
    '{"key": [1, 2, 3], "nested": {"a": null}}\n',
    "<div class='a'><p>text</p></div>\n",
)
_UNICODE = (
    "Größe, naïveté, coöperation — “quoted” … ½",
    "日本語のテキストと中文文本 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 é",
    "مرحبا بالعالم שלום",
    "\u200b\u200d\ufeff zero width",
)
_NEARLY_EMPTY = (" ", "\n", "a", ".", "\x00")


def mixed(count: int) -> list[str]:
    """Short, long, repetitive, code, unicode and nearly empty ones, the same every time."""
    rng = random.Random(17)
    prompts = [*_NEARLY_EMPTY, *_UNICODE, *_CODE, *_SENTENCES]
    prompts += [text * 6 for text in (*_CODE, *_SENTENCES)]
    prompts += ["abc" * 40, "1 2 3 4 5 " * 20, "\n\n\n\n" * 8, "ab" * 200]
    prompts += [" ".join(rng.choice(_SENTENCES) for _ in range(length)) for length in (3, 5, 8, 12)]
    while len(prompts) < count:
        prompts.append("".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(4, 90))))
    return prompts[:count]
