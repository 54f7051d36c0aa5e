"""Kept hidden states: a session on a cached prefix gets what another one computed, and never another text's."""

from __future__ import annotations

import pytest
import torch

from outrider.protocol.hidden_states.messages import FINAL_STATES, StateSpec, StateSpecs
from verifier.hidden_states.buffer import PROMPT_WINDOW, HiddenStateBuffer
from verifier.hidden_states.kept import KeptStates, StateBlocks

WIDTH = 4
LAYERS = StateSpec((1, 2), number=3)


def rows(first: int, end: int) -> torch.Tensor:
    """Each row tells its position."""
    return torch.arange(first, end, dtype=torch.float16)[:, None].expand(-1, WIDTH)


def text(length: int, seed: int = 0) -> list[int]:
    return [(seed + 7 * i) % 251 for i in range(length)]


def computed(kept: KeptStates, tokens: list[int], *, cached: int = 0, chunk: int = 50, salt: str = "s") -> list[float]:
    """Compute a prompt in chunks, then two verdicts of three tokens; return the positions that the verdicts carry."""
    committed = list(tokens)
    buffer = HiddenStateBuffer(True, salt, committed)
    buffer.steer(others=StateSpecs((LAYERS,)))
    buffer.follow(kept)
    buffer.begin(cached)
    for start in range(cached, len(tokens) - chunk, chunk):
        buffer.add(start + chunk, {n: rows(start, start + chunk) for n in (0, 3)})
        last = start + chunk
    first = last if cached + chunk < len(tokens) else cached
    sent: list[float] = []
    for new in ((1, 2, 3), (4, 5, 6)):
        end = len(committed) - 1 + len(new)
        taken = buffer.take(end, {n: rows(first, end) for n in (0, 3)}, new)
        committed += new
        first = end
        assert taken[0].rows == taken[3].rows
        assert taken[0].position + taken[0].count == end
        sent += torch.frombuffer(bytearray(taken[0].rows), dtype=torch.float16).view(-1, WIDTH)[:, 0].tolist()
    return sent


@pytest.mark.parametrize("length", [70, 200, 400])
@pytest.mark.parametrize("chunk", [7, 32, 50])
def test_a_cached_prefix_costs_no_states(length: int, chunk: int) -> None:
    kept, tokens = KeptStates(), text(length)
    whole = computed(kept, tokens, chunk=chunk)
    assert whole == list(range(max(0, length - PROMPT_WINDOW), length + 5))
    for cached in range(0, length, 32):
        assert computed(kept, tokens, cached=cached, chunk=chunk) == whole


def test_the_output_of_one_turn_is_the_prompt_of_the_next() -> None:
    kept, tokens = KeptStates(), text(94)
    computed(kept, tokens)
    longer = [*tokens, 1, 2, 3, 4, 5, 6, *text(30, seed=3)]
    assert computed(kept, longer, cached=96)[0] == 0


@pytest.mark.parametrize("other", ["salt", "text"])
def test_another_text_or_salt_gets_nothing(other: str) -> None:
    kept, tokens = KeptStates(), text(100)
    computed(kept, tokens)
    if other == "text":
        tokens[0] += 1
    assert computed(kept, tokens, cached=64, salt="t" if other == "salt" else "s")[0] == 64


def test_what_was_given_up_leaves_no_gap() -> None:
    """The states are bounded in bytes: the blocks used longest ago go first, with all that comes before them."""
    tokens, block = text(200), 2 * 32 * WIDTH * 2  # of both specs
    kept = KeptStates(max_bytes=4 * block)
    computed(kept, tokens, chunk=32)
    assert computed(kept, tokens, cached=192)[0] == 64
    assert computed(KeptStates(max_bytes=0), tokens, cached=192)[0] == 192


def test_states_that_are_switched_on_late_are_kept_from_there() -> None:
    kept, tokens = KeptStates(), text(100)
    buffer = HiddenStateBuffer(False, "s", tokens)
    assert buffer.follow(kept) == 100, "it reads none: all of its prefix may come from the cache"
    buffer.begin(0)
    buffer.add(100, {})
    buffer.steer(True)
    buffer.add(103, {0: rows(100, 103)}, (1, 2, 3))
    blocks = StateBlocks(kept, "s", tokens)
    assert not blocks.find(FINAL_STATES, 0, 96)


@pytest.mark.parametrize(("length", "window"), [(100, 0), (256, 0), (400, 128), (700, 416)])
def test_a_prefix_without_states_is_computed_again_from_its_window_on(length: int, window: int) -> None:
    """Once: then they are kept."""
    kept, tokens = KeptStates(), text(length)

    def may_come_from_cache() -> int:
        buffer = HiddenStateBuffer(True, "s", list(tokens))
        buffer.steer(others=StateSpecs((LAYERS,)))
        return buffer.follow(kept)

    assert may_come_from_cache() == window
    assert computed(kept, tokens, cached=window)[0] == max(0, length - PROMPT_WINDOW)
    assert may_come_from_cache() == length // 32 * 32
    tokens[window + 70] += 1  # from the third block of the window on, it is another text
    assert may_come_from_cache() == window + 64


def test_a_kept_block_is_not_a_view_of_all_rows() -> None:
    """Otherwise one block that is still in use would keep the memory of a whole prompt."""
    kept = KeptStates()
    StateBlocks(kept, "s", text(100)).keep(LAYERS, 0, rows(0, 100).contiguous())
    assert len(kept._rows) == 3
    assert {block.untyped_storage().nbytes() for block in kept._rows.values()} == {32 * WIDTH * 2}


@pytest.mark.parametrize("length", [1, 31, 32, 70, 400])
def test_a_drafter_that_begins_later_gets_the_newest_states(length: int) -> None:
    buffer = HiddenStateBuffer(True, "s", tokens := text(length))
    buffer.follow(KeptStates())
    assert buffer.newest() is None, "nothing is computed yet"
    buffer.take(length + 2, {0: rows(0, length + 2)}, (1, 2, 3))
    tokens += (1, 2, 3)
    newest = buffer.newest()
    assert newest is not None
    end = length + 2
    assert (newest.position + newest.count, newest.count) == (end, min(end, PROMPT_WINDOW))
    found = torch.frombuffer(bytearray(newest.rows), dtype=torch.float16).view(-1, WIDTH)[:, 0].tolist()
    assert found == list(range(newest.position, end))
    buffer.steer(final=False)
    assert buffer.newest() is None


def test_a_drafter_that_begins_later_gets_none_of_evicted_states() -> None:
    buffer = HiddenStateBuffer(True, "s", tokens := text(31))
    buffer.follow(KeptStates(max_bytes=0))
    buffer.take(32, {0: rows(0, 32)}, (1,))
    tokens += (1,)
    assert buffer.newest() is None, "the text ends with a block, whose rows are gone"
