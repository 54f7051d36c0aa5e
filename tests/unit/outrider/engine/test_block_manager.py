"""Pages: nothing is shared that differs, nothing is written that is shared, nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.engine.block_manager import BLOCK_TOKENS, BlockManager, blocks_for
from outrider.protocol.errors import Overloaded

PROMPT = list(range(3 * BLOCK_TOKENS + 5))


class Memory:
    """What a cache would hold: the whole path behind every slot."""

    def __init__(self, book: BlockManager) -> None:
        self.book = book
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def extend(self, session: str, tokens: Sequence[int]) -> None:
        copies = self.book.room(session, len(tokens))
        for source, target in copies:
            for i in range(BLOCK_TOKENS):
                if (source, i) in self.slots:
                    self.slots[target, i] = self.slots[source, i]
        held = self.book.held(session)
        assert held is not None
        path = list(held.tokens)
        for token in tokens:
            at = len(path)
            path.append(token)
            self.slots[held.pages[at // BLOCK_TOKENS], at % BLOCK_TOKENS] = tuple(path)
        self.book.add(session, tokens)

    def check(self, session: str) -> None:
        held = self.book.held(session)
        assert held is not None
        assert len(held.pages) >= blocks_for(len(held.tokens))
        for at in range(len(held.tokens)):
            slot = held.pages[at // BLOCK_TOKENS], at % BLOCK_TOKENS
            assert self.slots[slot] == tuple(held.tokens[: at + 1])


def test_a_prompt_is_cached_once() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT)
    memory.book.free("a")
    assert memory.book.blocks_in_use == 0
    assert memory.book.match_prefix("b", PROMPT) == 3 * BLOCK_TOKENS
    memory.extend("b", PROMPT[3 * BLOCK_TOKENS :])
    memory.check("b")
    assert memory.book.match_prefix("c", [*PROMPT[:40], 7, *PROMPT[40:]]) == BLOCK_TOKENS


def test_the_last_token_is_always_left_to_do() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT[: 2 * BLOCK_TOKENS])
    memory.book.free("a")
    assert memory.book.match_prefix("b", PROMPT[: 2 * BLOCK_TOKENS]) == BLOCK_TOKENS
    assert memory.book.match_prefix("c", PROMPT[: 2 * BLOCK_TOKENS + 1]) == 2 * BLOCK_TOKENS


def test_a_live_session_shares_too_once_it_has_gone_on() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT)
    memory.extend("a", [1])
    assert memory.book.match_prefix("b", PROMPT) == 3 * BLOCK_TOKENS
    assert memory.book.blocks_in_use == 4


def test_salts_keep_tenants_apart() -> None:
    memory = Memory(BlockManager(16))
    assert memory.book.match_prefix("a", PROMPT, "one") == 0
    memory.extend("a", PROMPT)
    memory.book.free("a")
    assert memory.book.match_prefix("b", PROMPT, "other") == 0
    assert memory.book.match_prefix("c", PROMPT) == 0
    assert memory.book.match_prefix("d", PROMPT, "one") == 3 * BLOCK_TOKENS


def test_a_full_cache_says_so_and_goes_on() -> None:
    memory = Memory(BlockManager(4))
    memory.extend("a", PROMPT[: 3 * BLOCK_TOKENS])
    with pytest.raises(Overloaded) as caught:
        memory.extend("b", PROMPT[: BLOCK_TOKENS + 1])
    assert (caught.value.field, caught.value.limit) == ("kv_tokens", str(4 * BLOCK_TOKENS))
    memory.book.free("a")
    memory.extend("b", PROMPT[: 3 * BLOCK_TOKENS + 1])
    memory.check("b")


def test_what_is_idle_is_bounded_and_the_end_of_a_text_goes_first() -> None:
    book = BlockManager(64, max_idle=2)
    memory = Memory(book)
    memory.extend("a", PROMPT)
    book.free("a")
    assert book.evictable_blocks == 2
    assert book.match_prefix("b", PROMPT) == 2 * BLOCK_TOKENS


def test_used_pages_come_before_fresh_ones() -> None:
    """A process's memory grows to what is used at once, not to all there is."""
    book = BlockManager(1000, max_idle=2)
    memory = Memory(book)
    for i in range(200):
        memory.extend(f"s{i}", [i] * (BLOCK_TOKENS + 3))
        book.free(f"s{i}")
    assert max(page for page, _ in memory.slots) < 8


def test_rolling_back_into_an_offered_page_copies_it() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT)
    memory.extend("a", [5])
    memory.book.truncate("a", BLOCK_TOKENS + 7)
    memory.extend("a", [9, 9, 9])
    memory.check("a")
    assert memory.book.match_prefix("b", PROMPT) == 3 * BLOCK_TOKENS
    memory.check("b")


def test_keeping_some_rows() -> None:
    book = BlockManager(8)
    book.room("a", 6)
    book.add("a", [1, 2, 3, 4, 5, 6])
    book.compact("a", 2, [1, 3])
    held = book.held("a")
    assert held is not None
    assert held.tokens == [1, 2, 4, 6]


def test_a_tree_is_not_offered_before_it_is_a_path() -> None:
    """A session may end in the middle of a step that failed: what its branches hold is no continuation of its text."""
    for kept in (False, True):
        book = BlockManager(16)
        book.room("a", BLOCK_TOKENS)
        book.add("a", PROMPT[:BLOCK_TOKENS])
        book.room("a", BLOCK_TOKENS)
        book.add("a", PROMPT[BLOCK_TOKENS : 2 * BLOCK_TOKENS], branching=True)
        if kept:
            book.compact("a", BLOCK_TOKENS, range(BLOCK_TOKENS))
        book.free("a")
        assert book.match_prefix("b", PROMPT) == (2 if kept else 1) * BLOCK_TOKENS


class Sessions(RuleBasedStateMachine):
    """Any order of everything: each slot holds the path that its session believes in, and every page has one place."""

    names = st.sampled_from(["a", "b", "c", "d"])

    @initialize(max_idle=st.sampled_from([0, 3, 24]))
    def begin(self, max_idle: int) -> None:
        self.book = BlockManager(24, max_idle)
        self.memory = Memory(self.book)

    @rule(name=names, kind=st.integers(0, 2), length=st.integers(1, 120), salt=st.sampled_from(["", "x"]))
    def open(self, name: str, kind: int, length: int, salt: str) -> None:
        if self.book.held(name) is None:
            tokens = [kind if i > 40 else 0 for i in range(length)]
            found = self.book.match_prefix(name, tokens, salt)
            self.memory.check(name)
            self._extend(name, tokens[found:])

    @rule(name=names, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40))
    def extend(self, name: str, tokens: list[int]) -> None:
        if self.book.held(name) is not None:
            self._extend(name, tokens)

    @rule(name=names, share=st.floats(0, 1))
    def truncate(self, name: str, share: float) -> None:
        held = self.book.held(name)
        if held is not None:
            self.book.truncate(name, int(share * len(held.tokens)))

    @precondition(lambda self: self.book.held("a") is not None and self.book.held("d") is None)
    @rule()
    def fork(self) -> None:
        self.book.fork("a", "d")

    @rule(name=names)
    def free(self, name: str) -> None:
        self.book.free(name)

    def _extend(self, name: str, tokens: list[int]) -> None:
        try:
            self.memory.extend(name, tokens)
        except Overloaded:
            assert self.book.blocks_in_use > 0
            self.book.free(name)

    @invariant()
    def all_is_as_believed(self) -> None:
        if not hasattr(self, "book"):
            return
        users = [0] * self.book.num_blocks
        for name in ("a", "b", "c", "d"):
            held = self.book.held(name)
            if held is not None:
                self.memory.check(name)
                for page in held.pages:
                    users[page] += 1
        assert users == self.book._users
        assert self.book.blocks_in_use == sum(1 for count in users if count)
        assert not set(self.book._free) & set(self.book._idle)


Sessions.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSessions = Sessions.TestCase
