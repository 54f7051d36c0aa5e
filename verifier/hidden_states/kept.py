"""Hidden states of texts that were computed before, so that a session on a cached prefix has them too.

They are kept as they are sent, in the blocks of the prefix index. A block's content depends on the text up to its end,
on the cache salt, and on what a drafter reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from outrider.engine.paged.block_manager import BLOCK_TOKENS, blocks_for
from outrider.protocol.hidden_states.messages import StateSpec

MAX_KEPT_BYTES = 256 << 20

Key = tuple[bytes, StateSpec]


class KeptStates:
    """Rows of full blocks of all sessions, the last used last."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: dict[Key, torch.Tensor] = {}

    def put(self, key: Key, rows: torch.Tensor) -> None:
        if key in self._rows:
            return
        self._rows[key] = rows = rows.clone()  # not a view of more
        self._num_bytes += rows.nbytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._rows.pop(next(iter(self._rows))).nbytes

    def run(self, keys: Iterable[Key]) -> list[torch.Tensor]:
        """Return the rows of `keys` up to the first missing one. Those of the first key now count as used last."""
        found = list(takewhile(self._rows.__contains__, keys))
        for key in found[::-1]:
            self._rows[key] = self._rows.pop(key)
        return [self._rows[key] for key in found]


class StateBlocks:
    """The blocks of one session's text: digests of its full ones, and rows of each spec's newest one."""

    def __init__(self, kept: KeptStates, salt: str, tokens: list[int]) -> None:
        """Follow `tokens`, which the session extends."""
        self._kept = kept
        self._tokens = tokens
        self._digests = [hashlib.blake2b(salt.encode(), digest_size=16).digest()]  # before each block
        self._open: dict[int, tuple[int, list[torch.Tensor]]] = {}  # by spec: a position, and rows from there on

    def clear(self, specs: Sequence[StateSpec]) -> None:
        """Forget the newest blocks of other specs."""
        self._open = {spec.number: self._open[spec.number] for spec in specs if spec.number in self._open}

    def known_to(self, spec: StateSpec, first: int) -> int:
        """Return the end of the block up to which rows are kept from position `first` on; at least one before it."""
        start, end = first // BLOCK_TOKENS, len(self._tokens) // BLOCK_TOKENS
        return (start + len(self._run(spec, range(start + 1, end + 1)))) * BLOCK_TOKENS

    def find(self, spec: StateSpec, first: int, end: int) -> list[torch.Tensor]:
        """Return the kept blocks of positions from `first` up to `end`, a block's end, after the last gap."""
        return self._run(spec, range(end // BLOCK_TOKENS, first // BLOCK_TOKENS, -1))[::-1]

    def newest(self, spec: StateSpec, count: int) -> tuple[int, list[torch.Tensor]]:
        """Return the position after the newest rows, and at least `count` of these, as far as they are kept."""
        first, parts = self._open.get(spec.number, (0, []))
        found = self.find(spec, max(0, first - count), first) if parts and first % BLOCK_TOKENS == 0 else []
        return first + sum(map(len, parts)), [part for part in (*found, *parts) if len(part)]

    def keep(self, spec: StateSpec, start: int, rows: torch.Tensor, new: Sequence[int] = ()) -> None:
        """Keep rows from position `start` on; `new` tokens follow the session's own."""
        first, parts = self._open.get(spec.number, (start, []))
        end = start + len(rows)
        if first + sum(map(len, parts)) != start:
            first, parts = start, []  # a gap: rows of another time
        parts.append(rows)
        if end // BLOCK_TOKENS > first // BLOCK_TOKENS:
            self._extend(end, new)
            joined = torch.cat(parts)
            first_whole, first_open = blocks_for(first), end // BLOCK_TOKENS
            for block in range(first_whole, first_open):
                at = block * BLOCK_TOKENS - first
                self._kept.put((self._digests[block + 1], replace(spec, number=0)), joined[at : at + BLOCK_TOKENS])
            rest = max(first_whole, first_open) * BLOCK_TOKENS
            first, parts = rest, [joined[rest - first :].clone()]  # not a view of more
        self._open[spec.number] = first, parts

    def _run(self, spec: StateSpec, blocks: range) -> list[torch.Tensor]:
        """Return the rows of blocks, which are numbered by their ends, up to the first one that is not kept."""
        self._extend(len(self._tokens), ())
        return self._kept.run((self._digests[block], replace(spec, number=0)) for block in blocks)

    def _extend(self, end: int, new: Sequence[int]) -> None:
        """Compute the digests of the full blocks before `end`."""
        for at in range((len(self._digests) - 1) * BLOCK_TOKENS, end - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            tokens = self._tokens[at : at + BLOCK_TOKENS]
            tokens += new[max(0, at - len(self._tokens)) :][: BLOCK_TOKENS - len(tokens)]
            digest = hashlib.blake2b(self._digests[-1], digest_size=16)
            digest.update(torch.tensor(tokens, dtype=torch.int32).numpy().tobytes())
            self._digests.append(digest.digest())
