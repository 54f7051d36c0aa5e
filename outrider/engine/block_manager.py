"""Which page of the key and value cache holds which tokens of whom.

Bookkeeping only: no tensors. A page holds BLOCK_TOKENS tokens of one path from
the beginning; what is in it depends on that path alone, so sessions that
begin alike share pages, and a page that nobody uses stays as an idle offer to
later sessions until its room is needed. A shared or offered page is never
written again: who must, gets a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.protocol.errors import Overloaded

BLOCK_TOKENS = 32

Key = tuple[int | str, tuple[int, ...]]  # the offer before it, or the salt at the beginning; its tokens


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True)
class BlockTable:
    """One session's tokens and the pages that they lie in."""

    salt: str = ""
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    offers: list[int] = field(default_factory=list)  # numbers of the offers that its first pages are like
    branches_from: int | None = None  # from here on its tokens are a tree, until some of them are kept

    @property
    def path_length(self) -> int:
        """Tokens that follow one from the other."""
        return len(self.tokens) if self.branches_from is None else self.branches_from

    @property
    def last_offer(self) -> int | str:
        return self.offers[-1] if self.offers else self.salt


class BlockManager:
    def __init__(self, num_blocks: int, max_idle: int | None = None) -> None:
        self.num_blocks = num_blocks
        self._max_idle = num_blocks if max_idle is None else max_idle
        self._users = [0] * num_blocks
        self._fresh = 0  # pages from here on were never used: used ones first, so that memory is touched late
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()  # offered pages without users, oldest first
        self._offers: dict[Key, tuple[int, int]] = {}  # → page, and the offer's number
        self._key_of: dict[int, Key] = {}
        self._next_offer = 0
        self._held: dict[str, BlockTable] = {}

    @property
    def blocks_in_use(self) -> int:
        return self._fresh - len(self._free) - len(self._idle)

    @property
    def evictable_blocks(self) -> int:
        return len(self._idle)

    def held(self, session: str) -> BlockTable | None:
        return self._held.get(session)

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a session with the pages that others left of the same tokens; how many tokens that saves.

        The last token is never among them: somebody wants its logits.
        """
        assert session not in self._held
        held = self._held[session] = BlockTable(salt)
        for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            part = tuple(tokens[start : start + BLOCK_TOKENS])
            offer = self._offers.get((held.last_offer, part))
            if offer is None:
                break
            page, number = offer
            self._use(page)
            held.pages.append(page)
            held.tokens += part
            held.offers.append(number)
        return len(held.tokens)

    def room(self, session: str, more: int) -> list[tuple[int, int]]:
        """Pages for `more` tokens behind what a session holds. Returns (from, to) for pages to be copied first."""
        held = self._held.setdefault(session, BlockTable())
        self._offer(held)
        length = len(held.tokens)
        needed = blocks_for(length + more) - len(held.pages)
        index, inside = divmod(length, BLOCK_TOKENS)
        copies = inside > 0 and self._is_shared(held.pages[index])
        if needed + copies > self._available():
            raise Overloaded(
                f"the cache of {self.num_blocks * BLOCK_TOKENS} tokens is full",
                field="kv_tokens",
                value=(self.num_blocks - self._available()) * BLOCK_TOKENS,
                limit=self.num_blocks * BLOCK_TOKENS,
            )
        made: list[tuple[int, int]] = []
        if copies:
            copied = held.pages[index]
            held.pages[index] = self._take()
            made.append((copied, held.pages[index]))
            self._release(copied)
        held.pages += [self._take() for _ in range(needed)]
        return made

    def add(self, session: str, tokens: Sequence[int], *, branching: bool = False) -> None:
        """These now lie behind what the session held, in the room made for them."""
        held = self._held[session]
        if branching and held.branches_from is None:
            held.branches_from = len(held.tokens)
        held.tokens += tokens

    def truncate(self, session: str, length: int) -> None:
        held = self._held.get(session)
        if held is None or length >= len(held.tokens):
            return
        del held.tokens[length:]
        if held.branches_from is not None and length <= held.branches_from:
            held.branches_from = None
        kept = blocks_for(length)
        for page in reversed(held.pages[kept:]):
            self._release(page)
        del held.pages[kept:]
        del held.offers[length // BLOCK_TOKENS :]

    def compact(self, session: str, base: int, rows: Sequence[int]) -> None:
        """Of the tokens behind `base`, these in this order are the session's."""
        held = self._held[session]
        chosen = [held.tokens[base + row] for row in rows]
        self.truncate(session, base + len(rows))
        held.tokens[base:] = chosen
        held.branches_from = None

    def fork(self, session: str, copy: str) -> None:
        held = self._held[session]
        self._offer(held)
        for page in held.pages:
            self._use(page)
        self._held[copy] = BlockTable(held.salt, list(held.tokens), list(held.pages), list(held.offers))

    def free(self, session: str) -> None:
        held = self._held.pop(session, None)
        if held is None:
            return
        self._offer(held)
        for page in reversed(held.pages):  # the end of a text is forgotten before its beginning
            self._release(page)

    def evict_all(self) -> None:
        while self._idle:
            self._forget_oldest()

    def _offer(self, held: BlockTable) -> None:
        """Let others find this session's full pages."""
        while len(held.offers) < held.path_length // BLOCK_TOKENS:
            index = len(held.offers)
            key = (held.last_offer, tuple(held.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]))
            if key not in self._offers:
                self._offers[key] = (held.pages[index], self._next_offer)
                self._key_of[held.pages[index]] = key
                self._next_offer += 1
            held.offers.append(self._offers[key][1])

    def _is_shared(self, page: int) -> bool:
        return self._users[page] > 1 or page in self._key_of

    def _available(self) -> int:
        return len(self._free) + len(self._idle) + self.num_blocks - self._fresh

    def _take(self) -> int:
        if not self._free and (len(self._idle) >= self._max_idle or self._fresh == self.num_blocks) and self._idle:
            self._forget_oldest()
        if self._free:
            page = self._free.pop()
        else:
            page = self._fresh
            self._fresh += 1
        self._users[page] = 1
        return page

    def _use(self, page: int) -> None:
        self._users[page] += 1
        self._idle.pop(page, None)

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page]:
            return
        if page in self._key_of:
            self._idle[page] = None
            if len(self._idle) > self._max_idle:
                self._forget_oldest()
        else:
            self._free.append(page)

    def _forget_oldest(self) -> None:
        page, _ = self._idle.popitem(last=False)
        del self._offers[self._key_of.pop(page)]
        self._free.append(page)
