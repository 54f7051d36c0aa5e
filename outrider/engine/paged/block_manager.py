"""Allocation of KV cache blocks: which block holds which tokens of which session.

Bookkeeping only, no tensors. A block holds BLOCK_TOKENS tokens of one path
from the start of a text. Its content depends on that path alone, so sessions
with a common prefix share blocks. Full blocks enter the prefix index. A block
without users stays in the index, evictable, until its memory is needed. A
shared or indexed block is never written again: a session that must write to
it gets a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.protocol.errors import Overloaded

BLOCK_TOKENS = 32

PrefixKey = tuple[
    int | str, tuple[int, ...]
]  # number of the entry before, or the salt at the start; the block's tokens


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True)
class BlockTable:
    """One session's tokens and the blocks that hold them."""

    salt: str = ""
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    indexed: list[int] = field(default_factory=list)  # entries of the prefix index that its first blocks equal
    branches_from: int | None = None  # from here on its tokens are a tree, until `compact`

    @property
    def path_length(self) -> int:
        """Return the number of tokens before the tree."""
        return len(self.tokens) if self.branches_from is None else self.branches_from

    @property
    def last_entry(self) -> int | str:
        """Return the first part of the next block's key."""
        return self.indexed[-1] if self.indexed else self.salt


class BlockManager:
    """Allocator of all blocks, with their users and the prefix index."""

    def __init__(self, num_blocks: int, max_evictable: int | None = None) -> None:
        self.num_blocks = num_blocks
        self._max_evictable = num_blocks if max_evictable is None else max_evictable
        self._users = [0] * num_blocks
        self._fresh = 0  # blocks from here on were never used; used ones are taken first, so memory is touched late
        self._free: list[int] = []
        self._evictable: OrderedDict[int, None] = OrderedDict()  # indexed blocks without users, oldest first
        self._index: dict[PrefixKey, tuple[int, int]] = {}  # → block, number of the entry
        self._key_of: dict[int, PrefixKey] = {}
        self._next_entry = 0
        self._tables: dict[str, BlockTable] = {}

    @property
    def blocks_in_use(self) -> int:
        """Return the number of blocks that sessions use."""
        return self._fresh - len(self._free) - len(self._evictable)

    @property
    def evictable_blocks(self) -> int:
        """Return the number of cached blocks without users."""
        return len(self._evictable)

    def table(self, session: str) -> BlockTable | None:
        """Return a session's block table; None for an unknown session."""
        return self._tables.get(session)

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a session with the cached blocks of the same tokens, and return the number of tokens found.

        The last token is never among them: its logits are needed.
        """
        assert session not in self._tables
        table = self._tables[session] = BlockTable(salt)
        for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            part = tuple(tokens[start : start + BLOCK_TOKENS])
            entry = self._index.get((table.last_entry, part))
            if entry is None:
                break
            block, number = entry
            self._use(block)
            table.blocks.append(block)
            table.tokens += part
            table.indexed.append(number)
        return len(table.tokens)

    def allocate(self, session: str, more: int) -> list[tuple[int, int]]:
        """Allocate blocks for `more` tokens of a session. Return (source, target) of blocks to copy first.

        Raises Overloaded when the cache is full.
        """
        table = self._tables.setdefault(session, BlockTable())
        self._add_to_index(table)
        length = len(table.tokens)
        needed = blocks_for(length + more) - len(table.blocks)
        index, offset = divmod(length, BLOCK_TOKENS)
        must_copy = offset > 0 and self._is_shared(table.blocks[index])
        if needed + must_copy > self._available():
            raise Overloaded(
                f"the cache of {self.num_blocks * BLOCK_TOKENS} tokens is full",
                field="kv_tokens",
                value=(self.num_blocks - self._available()) * BLOCK_TOKENS,
                limit=self.num_blocks * BLOCK_TOKENS,
            )
        copies: list[tuple[int, int]] = []
        if must_copy:
            source = table.blocks[index]
            table.blocks[index] = self._take()
            copies.append((source, table.blocks[index]))
            self._release(source)
        table.blocks += [self._take() for _ in range(needed)]
        return copies

    def append(self, session: str, tokens: Sequence[int], *, branching: bool = False) -> None:
        """Record tokens that were written into allocated blocks."""
        table = self._tables[session]
        if branching and table.branches_from is None:
            table.branches_from = len(table.tokens)
        table.tokens += tokens

    def truncate(self, session: str, length: int) -> None:
        """Drop a session's tokens after the first `length`."""
        table = self._tables.get(session)
        if table is None or length >= len(table.tokens):
            return
        del table.tokens[length:]
        if table.branches_from is not None and length <= table.branches_from:
            table.branches_from = None
        kept = blocks_for(length)
        for block in reversed(table.blocks[kept:]):
            self._release(block)
        del table.blocks[kept:]
        del table.indexed[length // BLOCK_TOKENS :]

    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        """Keep, of the tokens after `base`, those at `indices`, in this order."""
        table = self._tables[session]
        chosen = [table.tokens[base + index] for index in indices]
        self.truncate(session, base + len(indices))
        table.tokens[base:] = chosen
        table.branches_from = None

    def fork(self, session: str, copy: str) -> None:
        """Begin the session `copy` with the blocks of another one."""
        table = self._tables[session]
        self._add_to_index(table)
        for block in table.blocks:
            self._use(block)
        self._tables[copy] = BlockTable(table.salt, list(table.tokens), list(table.blocks), list(table.indexed))

    def free(self, session: str) -> None:
        """Release a session's blocks; full ones stay in the prefix index."""
        table = self._tables.pop(session, None)
        if table is None:
            return
        self._add_to_index(table)
        for block in reversed(table.blocks):  # the end of a text is evicted before its start
            self._release(block)

    def evict_all(self) -> None:
        """Evict every cached block without users."""
        while self._evictable:
            self._evict_oldest()

    def _add_to_index(self, table: BlockTable) -> None:
        """Enter a session's full blocks into the prefix index."""
        while len(table.indexed) < table.path_length // BLOCK_TOKENS:
            index = len(table.indexed)
            key = (table.last_entry, tuple(table.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]))
            if key not in self._index:
                self._index[key] = (table.blocks[index], self._next_entry)
                self._key_of[table.blocks[index]] = key
                self._next_entry += 1
            table.indexed.append(self._index[key][1])

    def _is_shared(self, block: int) -> bool:
        return self._users[block] > 1 or block in self._key_of

    def _available(self) -> int:
        return len(self._free) + len(self._evictable) + self.num_blocks - self._fresh

    def _take(self) -> int:
        at_limit = len(self._evictable) >= self._max_evictable or self._fresh == self.num_blocks
        if not self._free and at_limit and self._evictable:
            self._evict_oldest()
        if self._free:
            block = self._free.pop()
        else:
            block = self._fresh
            self._fresh += 1
        self._users[block] = 1
        return block

    def _use(self, block: int) -> None:
        self._users[block] += 1
        self._evictable.pop(block, None)

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block]:
            return
        if block in self._key_of:
            self._evictable[block] = None
            if len(self._evictable) > self._max_evictable:
                self._evict_oldest()
        else:
            self._free.append(block)

    def _evict_oldest(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        del self._index[self._key_of.pop(block)]
        self._free.append(block)
