"""What a coordinator remembers of the prompts that it has sent to one verifier."""

from __future__ import annotations

from coordinator.placement import sent_prefixes
from coordinator.placement.sent_prefixes import BLOCK_TOKENS, PromptPrefix, SentPrefixes


def prompt(*parts: int, salt: str = "") -> PromptPrefix:
    """Return a prompt of a block per number, and half a block."""
    return PromptPrefix([part for part in parts for _ in range(BLOCK_TOKENS)] + [0] * (BLOCK_TOKENS // 2), salt)


def test_full_blocks_are_found_up_to_the_first_difference() -> None:
    sent = SentPrefixes()
    sent.record(prompt(1, 2, 3), 0)
    assert len(prompt(1, 2, 3).keys) == len(sent) == 3
    for other, found in ((prompt(1, 2, 3), 3), (prompt(1, 2, 4), 2), (prompt(2, 2, 3), 0), (prompt(1, 2), 2)):
        assert sent.found(other) == found
    assert sent.found(PromptPrefix([1] * (BLOCK_TOKENS - 1))) == 0


def test_a_block_belongs_to_what_precedes_it_and_to_its_salt() -> None:
    sent = SentPrefixes()
    sent.record(prompt(1, 2), 0)
    assert sent.found(prompt(2)) == 0
    assert sent.found(prompt(1, 2, salt="key-2/x")) == 0


def test_a_verifier_without_much_cache_forgets_the_ends_first() -> None:
    sent = SentPrefixes()
    sent.record(prompt(1, 2, 3), 4 * BLOCK_TOKENS)
    sent.record(prompt(1, 4, 5), 4 * BLOCK_TOKENS)
    assert len(sent) == 4
    assert (sent.found(prompt(1, 4, 5)), sent.found(prompt(1, 2, 3))) == (3, 2)


def test_memory_is_bounded() -> None:
    sent = SentPrefixes()
    for start in range(5):
        sent.record(PromptPrefix(range(start, start + BLOCK_TOKENS * 10_000)), 0)
    assert len(sent) == sent_prefixes.MAX_BLOCKS
