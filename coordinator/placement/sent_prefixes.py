"""Sent prefixes: which parts of prompts a verifier may still have in its cache.

A coordinator knows only what it has sent. Prompts are cut into blocks, and a block's key stands for all tokens up to
its end. Keys cost memory, not correctness: a wrong one costs a prefill.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import takewhile

BLOCK_TOKENS = 32
MAX_BLOCKS = 32_768  # per verifier: a million tokens
_KEY_BYTES = 8


class PromptPrefix:
    """The prompt of one session in blocks, and the cache that the session may need."""

    def __init__(self, tokens: Sequence[int], salt: str = "", more_tokens: int = 0) -> None:
        """Begin without keys; `more_tokens` are those that follow the prompt. Prefixes of other salts never match."""
        self.num_tokens = len(tokens) + more_tokens
        self._tokens = tokens
        self._salt = salt

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """Return the keys of the full blocks, each made of the one before and the block's tokens."""
        key = blake2b(self._salt.encode(), digest_size=_KEY_BYTES).digest()
        keys = []
        for start in range(0, min(len(self._tokens), BLOCK_TOKENS * MAX_BLOCKS) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = array("I", self._tokens[start : start + BLOCK_TOKENS]).tobytes()
            key = blake2b(key + block, digest_size=_KEY_BYTES).digest()
            keys.append(key)
        return tuple(keys)


class SentPrefixes:
    """Keys of what was sent to one verifier, without those that were not used for the longest time."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def found(self, prefix: PromptPrefix) -> int:
        """Return the number of leading blocks that were sent before."""
        return sum(1 for _ in takewhile(self._keys.__contains__, prefix.keys))

    def record(self, prefix: PromptPrefix, capacity_tokens: int) -> None:
        """Record a prompt; `capacity_tokens` are those that the verifier's cache holds, 0 if unknown."""
        limit = min(MAX_BLOCKS, capacity_tokens // BLOCK_TOKENS or MAX_BLOCKS)
        for key in reversed(prefix.keys[:limit]):  # the end of a prompt is forgotten before its start
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > limit:
            self._keys.popitem(last=False)
