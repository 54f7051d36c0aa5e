"""The blocks of a KV cache: which are free, which are used, and which hold a known prefix.

A full block enters the prefix index under its tokens and all before them. A
block without users stays in the index, evictable, until its memory is needed.
"""

from __future__ import annotations

from collections import OrderedDict

# Number of the entry before, or the salt at the start of a text; the block's tokens.
PrefixKey = tuple[int | str, tuple[int, ...]]


class BlockPool:
    """All blocks, with the number of their users and the prefix index."""

    def __init__(self, num_blocks: int, max_evictable: int | None = None) -> None:
        self.num_blocks = num_blocks
        self._max_evictable = num_blocks if max_evictable is None else max_evictable
        self.num_used = 0
        self.key_of: dict[int, PrefixKey] = {}  # of the indexed blocks, which must not be written again
        self._users = [0] * num_blocks
        self._fresh = 0  # blocks from here on were never used; used ones are taken first, so memory is touched late
        self._free: list[int] = []
        self._evictable: OrderedDict[int, None] = OrderedDict()  # indexed blocks without users, oldest first
        self._index: dict[PrefixKey, tuple[int, int]] = {}  # → block, number of the entry
        self._next_entry = 0

    @property
    def num_evictable(self) -> int:
        """Return the number of cached blocks without users."""
        return len(self._evictable)

    def take(self) -> int:
        """Return a block without users, to be written."""
        at_limit = len(self._evictable) >= self._max_evictable or self._fresh == self.num_blocks
        if not self._free and at_limit and self._evictable:
            self._evict_oldest()
        if self._free:
            block = self._free.pop()
        else:
            block = self._fresh
            self._fresh += 1
        self._users[block] = 1
        self.num_used += 1
        return block

    def release(self, block: int) -> None:
        """Drop one user; an indexed block without users becomes evictable."""
        self._users[block] -= 1
        if self._users[block]:
            return
        self.num_used -= 1
        if block in self.key_of:
            self._evictable[block] = None
            if len(self._evictable) > self._max_evictable:
                self._evict_oldest()
        else:
            self._free.append(block)

    def share(self, key: PrefixKey) -> tuple[int, int] | None:
        """Add a user to the block of a prefix. Return the block and the number of its entry; None: not cached."""
        found = self._index.get(key)
        if found is not None:
            block, _ = found
            self.num_used += not self._users[block]
            self._users[block] += 1
            self._evictable.pop(block, None)
        return found

    def enter(self, key: PrefixKey, block: int) -> int:
        """Enter a full block into the prefix index, unless another holds the same. Return the number of the entry."""
        if key not in self._index:
            self._index[key] = (block, self._next_entry)
            self.key_of[block] = key
            self._next_entry += 1
        return self._index[key][1]

    def evict_all(self) -> None:
        """Evict every cached block without users."""
        while self._evictable:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        del self._index[self.key_of.pop(block)]
        self._free.append(block)
