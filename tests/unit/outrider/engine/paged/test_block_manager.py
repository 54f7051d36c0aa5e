"""Pages: nothing is shared that differs, nothing is written that is shared, nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from outrider.engine.paged.block_manager import BLOCK_TOKENS, BlockManager, blocks_for
from outrider.protocol.errors import Overloaded

PROMPT = list(range(3 * BLOCK_TOKENS + 5))


class Memory:
    """What a cache would hold: the whole path behind every slot."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def extend(self, session: str, tokens: Sequence[int]) -> None:
        copy = self.blocks.allocate(session, len(tokens))
        if copy is not None:
            source, target = copy
            for i in range(BLOCK_TOKENS):
                if (source, i) in self.slots:
                    self.slots[target, i] = self.slots[source, i]
        held = self.blocks.tables[session]
        path = list(held.tokens)
        for token in tokens:
            at = len(path)
            path.append(token)
            self.slots[held.blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS] = tuple(path)
        self.blocks.append(session, tokens)

    def check(self, session: str) -> None:
        held = self.blocks.tables[session]
        assert len(held.blocks) >= blocks_for(len(held.tokens))
        for at in range(len(held.tokens)):
            slot = held.blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS
            assert self.slots[slot] == tuple(held.tokens[: at + 1])


def test_a_prompt_is_cached_once() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT)
    memory.blocks.free("a")
    assert memory.blocks.pool.num_used == 0
    assert memory.blocks.match_prefix("b", PROMPT) == 3 * BLOCK_TOKENS
    memory.extend("b", PROMPT[3 * BLOCK_TOKENS :])
    memory.check("b")
    assert memory.blocks.match_prefix("c", [*PROMPT[:40], 7, *PROMPT[40:]]) == BLOCK_TOKENS


def test_the_last_token_is_always_left_to_do() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT[: 2 * BLOCK_TOKENS])
    memory.blocks.free("a")
    assert memory.blocks.match_prefix("b", PROMPT[: 2 * BLOCK_TOKENS]) == BLOCK_TOKENS
    assert memory.blocks.match_prefix("c", PROMPT[: 2 * BLOCK_TOKENS + 1]) == 2 * BLOCK_TOKENS


def test_a_live_session_shares_too_once_it_has_gone_on() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT)
    memory.extend("a", [1])
    assert memory.blocks.match_prefix("b", PROMPT) == 3 * BLOCK_TOKENS
    assert memory.blocks.pool.num_used == 4


def test_salts_keep_tenants_apart() -> None:
    memory = Memory(BlockManager(16))
    assert memory.blocks.match_prefix("a", PROMPT, "one") == 0
    memory.extend("a", PROMPT)
    memory.blocks.free("a")
    assert memory.blocks.match_prefix("b", PROMPT, "other") == 0
    assert memory.blocks.match_prefix("c", PROMPT) == 0
    assert memory.blocks.match_prefix("d", PROMPT, "one") == 3 * BLOCK_TOKENS


def test_a_full_cache_says_so_and_goes_on() -> None:
    memory = Memory(BlockManager(4))
    memory.extend("a", PROMPT[: 3 * BLOCK_TOKENS])
    with pytest.raises(Overloaded) as caught:
        memory.extend("b", PROMPT[: BLOCK_TOKENS + 1])
    assert (caught.value.field, caught.value.limit) == ("kv_tokens", str(4 * BLOCK_TOKENS))
    memory.blocks.free("a")
    memory.extend("b", PROMPT[: 3 * BLOCK_TOKENS + 1])
    memory.check("b")


def test_what_is_idle_is_bounded_and_the_end_of_a_text_goes_first() -> None:
    blocks = BlockManager(64, max_evictable=2)
    memory = Memory(blocks)
    memory.extend("a", PROMPT)
    blocks.free("a")
    assert blocks.pool.num_evictable == 2
    assert blocks.match_prefix("b", PROMPT) == 2 * BLOCK_TOKENS


def test_used_pages_come_before_fresh_ones() -> None:
    """A process's memory grows to what is used at once, not to all there is."""
    blocks = BlockManager(1000, max_evictable=2)
    memory = Memory(blocks)
    for i in range(200):
        memory.extend(f"s{i}", [i] * (BLOCK_TOKENS + 3))
        blocks.free(f"s{i}")
    assert max(page for page, _ in memory.slots) < 8


def test_rolling_back_into_an_offered_page_copies_it() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT)
    memory.extend("a", [5])
    memory.blocks.truncate("a", BLOCK_TOKENS + 7)
    memory.extend("a", [9, 9, 9])
    memory.check("a")
    assert memory.blocks.match_prefix("b", PROMPT) == 3 * BLOCK_TOKENS
    memory.check("b")


def test_keeping_some_rows() -> None:
    blocks = BlockManager(8)
    blocks.allocate("a", 6)
    blocks.append("a", [1, 2, 3, 4, 5, 6])
    blocks.compact("a", 2, [1, 3])
    held = blocks.tables["a"]
    assert held.tokens == [1, 2, 4, 6]


def test_a_tree_is_not_offered_before_it_is_a_path() -> None:
    """A session may end in the middle of a step that failed: what its branches hold is no continuation of its text."""
    for kept in (False, True):
        blocks = BlockManager(16)
        blocks.allocate("a", BLOCK_TOKENS)
        blocks.append("a", PROMPT[:BLOCK_TOKENS])
        blocks.allocate("a", BLOCK_TOKENS)
        blocks.append("a", PROMPT[BLOCK_TOKENS : 2 * BLOCK_TOKENS], branching=True)
        if kept:
            blocks.compact("a", BLOCK_TOKENS, range(BLOCK_TOKENS))
        blocks.free("a")
        assert blocks.match_prefix("b", PROMPT) == (2 if kept else 1) * BLOCK_TOKENS


def test_trees_that_follow_each_other_are_not_offered() -> None:
    """Branches begin where the first one does."""
    blocks = BlockManager(16)
    blocks.allocate("a", BLOCK_TOKENS)
    blocks.append("a", PROMPT[:BLOCK_TOKENS])
    for start in (BLOCK_TOKENS, 2 * BLOCK_TOKENS):
        blocks.allocate("a", BLOCK_TOKENS)
        blocks.append("a", PROMPT[start : start + BLOCK_TOKENS], branching=True)
    blocks.free("a")
    assert blocks.match_prefix("b", PROMPT) == BLOCK_TOKENS


class Sessions(RuleBasedStateMachine):
    """Any order of everything: each slot holds the path that its session believes in, and every page has one place."""

    names = st.sampled_from(["a", "b", "c", "d"])

    @initialize(max_evictable=st.sampled_from([0, 3, 24]))
    def begin(self, max_evictable: int) -> None:
        self.blocks = BlockManager(24, max_evictable)
        self.memory = Memory(self.blocks)

    @rule(name=names, kind=st.integers(0, 2), length=st.integers(1, 120), salt=st.sampled_from(["", "x"]))
    def open(self, name: str, kind: int, length: int, salt: str) -> None:
        if self.blocks.tables.get(name) is None:
            tokens = [kind if i > 40 else 0 for i in range(length)]
            found = self.blocks.match_prefix(name, tokens, salt)
            self.memory.check(name)
            self._extend(name, tokens[found:])

    @rule(name=names, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40))
    def extend(self, name: str, tokens: list[int]) -> None:
        if self.blocks.tables.get(name) is not None:
            self._extend(name, tokens)

    @rule(name=names, share=st.floats(0, 1))
    def truncate(self, name: str, share: float) -> None:
        held = self.blocks.tables.get(name)
        if held is not None:
            self.blocks.truncate(name, int(share * len(held.tokens)))

    @rule(name=names)
    def free(self, name: str) -> None:
        self.blocks.free(name)

    def _extend(self, name: str, tokens: list[int]) -> None:
        try:
            self.memory.extend(name, tokens)
        except Overloaded:
            assert self.blocks.pool.num_used > 0
            self.blocks.free(name)

    @invariant()
    def all_is_as_believed(self) -> None:
        if not hasattr(self, "blocks"):
            return
        users = [0] * self.blocks.pool.num_blocks
        for name in ("a", "b", "c", "d"):
            held = self.blocks.tables.get(name)
            if held is not None:
                self.memory.check(name)
                for page in held.blocks:
                    users[page] += 1
        assert users == self.blocks.pool._users
        assert self.blocks.pool.num_used == sum(1 for count in users if count)
        assert not set(self.blocks.pool._free) & set(self.blocks.pool._evictable)


Sessions.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSessions = Sessions.TestCase


def test_a_copy_before_a_write_needs_room_too() -> None:
    memory = Memory(BlockManager(2))
    memory.extend("a", PROMPT[:BLOCK_TOKENS])
    memory.blocks.free("a")
    assert memory.blocks.match_prefix("a", PROMPT[: BLOCK_TOKENS + 1]) == BLOCK_TOKENS
    assert memory.blocks.match_prefix("b", PROMPT[: BLOCK_TOKENS + 1]) == BLOCK_TOKENS
    memory.extend("a", [1])
    memory.blocks.truncate("b", BLOCK_TOKENS - 2)
    with pytest.raises(Overloaded):
        memory.extend("b", [2])
    memory.check("a")


def test_what_follows_a_tree_that_was_taken_back_is_a_prefix_again() -> None:
    memory = Memory(BlockManager(16))
    memory.extend("a", PROMPT[:10])
    memory.blocks.allocate("a", 3)
    memory.blocks.append("a", [7, 8, 9], branching=True)
    memory.blocks.truncate("a", 10)
    memory.extend("a", PROMPT[10:])
    memory.blocks.free("a")
    assert memory.blocks.match_prefix("b", PROMPT) == 3 * BLOCK_TOKENS


@pytest.mark.parametrize("kept", [0, 5, BLOCK_TOKENS - 1])
def test_after_a_rollback_nothing_is_found_under_the_text_that_was_dropped(kept: int) -> None:
    """It would have the keys and values of another text. The third block is dropped, or all but its first tokens."""
    memory = Memory(BlockManager(16))
    other, rest = [5] * (BLOCK_TOKENS - kept), list(range(500, 500 + BLOCK_TOKENS))
    memory.extend("a", PROMPT[: 3 * BLOCK_TOKENS])
    memory.extend("a", [1])
    memory.blocks.truncate("a", 2 * BLOCK_TOKENS + kept)
    for tokens in (other, rest, [1]):
        memory.extend("a", tokens)
    assert memory.blocks.match_prefix("b", [*PROMPT[: 3 * BLOCK_TOKENS], *rest, 1]) == 3 * BLOCK_TOKENS
    assert memory.blocks.match_prefix("c", [*PROMPT[: 2 * BLOCK_TOKENS + kept], *other, *rest, 1]) == 4 * BLOCK_TOKENS
    memory.check("b")
    memory.check("c")


def test_a_cached_block_that_a_session_uses_again_is_not_evicted() -> None:
    memory = Memory(BlockManager(2, max_evictable=1))
    memory.extend("a", PROMPT[:BLOCK_TOKENS])
    memory.blocks.free("a")
    assert memory.blocks.match_prefix("b", PROMPT[: BLOCK_TOKENS + 1]) == BLOCK_TOKENS
    assert memory.blocks.pool.num_evictable == 0
    memory.extend("c", [7] * BLOCK_TOKENS)
    memory.check("b")


def test_a_copied_block_is_given_back() -> None:
    memory = Memory(BlockManager(4))
    memory.extend("a", PROMPT[:BLOCK_TOKENS])
    memory.extend("a", [1])
    assert memory.blocks.match_prefix("b", PROMPT[: BLOCK_TOKENS + 1]) == BLOCK_TOKENS
    memory.blocks.truncate("b", BLOCK_TOKENS - 2)
    memory.extend("b", [2])
    for session in "ab":
        memory.check(session)
        memory.blocks.free(session)
    assert memory.blocks.pool.num_used == 0
