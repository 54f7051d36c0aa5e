"""Allocation of KV cache blocks: which block holds which tokens of which session.

Bookkeeping only, no tensors. A block holds BLOCK_TOKENS tokens of one path from the start of a text. Its content
depends on that path alone, so sessions with a common prefix share blocks. An indexed block is never written again: a
session that must write to it gets a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.paged.block_pool import BlockPool
from outrider.protocol.errors import Overloaded

BLOCK_TOKENS = 32


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
    def last_entry(self) -> int | str:
        """Return the first part of the next block's key."""
        return self.indexed[-1] if self.indexed else self.salt


class BlockManager:
    """The sessions' block tables over one pool of blocks."""

    def __init__(self, num_blocks: int, max_evictable: int | None = None) -> None:
        self.pool = BlockPool(num_blocks, max_evictable)
        self.tables: dict[str, BlockTable] = {}  # by session

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a session with cached blocks; return the tokens found, never the last: its logits are needed."""
        assert session not in self.tables
        table = self.tables[session] = BlockTable(salt)
        for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            part = tuple(tokens[start : start + BLOCK_TOKENS])
            found = self.pool.share((table.last_entry, part))
            if found is None:
                break
            block, entry = found
            table.blocks.append(block)
            table.tokens += part
            table.indexed.append(entry)
        return len(table.tokens)

    def allocate(self, session: str, more: int) -> tuple[int, int] | None:
        """Allocate blocks for `more` tokens; return a block to copy first and its copy. Raise Overloaded if full."""
        table = self.tables.get(session) or self.tables.setdefault(session, BlockTable())
        self._add_to_index(table)
        length = len(table.tokens)
        needed = blocks_for(length + more) - len(table.blocks)
        index, offset = divmod(length, BLOCK_TOKENS)
        must_copy = offset > 0 and table.blocks[index] in self.pool.key_of
        if self.pool.num_used + needed + must_copy > self.pool.num_blocks:
            used, limit = self.pool.num_used * BLOCK_TOKENS, self.pool.num_blocks * BLOCK_TOKENS
            raise Overloaded(f"the cache of {limit} tokens is full", field="kv_tokens", value=used, limit=limit)
        copy = None
        if must_copy:
            copy = table.blocks[index], self.pool.take()
            table.blocks[index] = copy[1]
            self.pool.release(copy[0])
        table.blocks += [self.pool.take() for _ in range(needed)]
        return copy

    def append(self, session: str, tokens: Sequence[int], *, branching: bool = False) -> None:
        """Record tokens that were written into allocated blocks."""
        table = self.tables[session]
        if branching and table.branches_from is None:
            table.branches_from = len(table.tokens)
        table.tokens += tokens

    def truncate(self, session: str, length: int) -> None:
        """Drop a session's tokens after the first `length`."""
        table = self.tables.get(session)
        if table is None or length >= len(table.tokens):
            return
        del table.tokens[length:]
        if table.branches_from is not None and length <= table.branches_from:
            table.branches_from = None
        kept = blocks_for(length)
        for block in reversed(table.blocks[kept:]):
            self.pool.release(block)
        del table.blocks[kept:]
        del table.indexed[length // BLOCK_TOKENS :]

    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        """Keep, of the tokens after `base`, those at `indices`, in this order."""
        table = self.tables[session]
        chosen = [table.tokens[base + index] for index in indices]
        self.truncate(session, base + len(indices))
        table.tokens[base:] = chosen
        table.branches_from = None

    def free(self, session: str) -> None:
        """Release a session's blocks; full ones stay in the prefix index."""
        table = self.tables.pop(session, None)
        if table is None:
            return
        self._add_to_index(table)
        for block in reversed(table.blocks):  # the end of a text is evicted before its start
            self.pool.release(block)

    def _add_to_index(self, table: BlockTable) -> None:
        """Enter a session's full blocks into the prefix index."""
        path_length = len(table.tokens) if table.branches_from is None else table.branches_from
        for index in range(len(table.indexed), path_length // BLOCK_TOKENS):
            part = tuple(table.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])
            table.indexed.append(self.pool.enter((table.last_entry, part), table.blocks[index]))
