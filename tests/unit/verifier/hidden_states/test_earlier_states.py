"""Pieces of kept states: whole, in order, bounded, and never of another text."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.hidden_states.earlier_states import MAX_EARLIER_POSITIONS, EarlierStates
from outrider.protocol.hidden_states.messages import MAX_HIDDEN_POSITIONS, StateSpec, StateSpecs
from tests.unit.verifier.hidden_states.test_kept import LAYERS, WIDTH, rows, text
from verifier.hidden_states.buffer import HiddenStateBuffer
from verifier.hidden_states.earlier_states import MAX_QUEUED, PIECE_BYTES, earlier_states, queue_request
from verifier.hidden_states.kept import KeptStates

WIDE = StateSpec((1,), width=8192, number=3)


def buffer_of(tokens: list[int], kept: KeptStates, width: int = WIDTH, *, computed: bool = True) -> HiddenStateBuffer:
    """Return the buffer of a session that has computed its prompt, or found it in the cache."""
    buffer = HiddenStateBuffer(False, "s", tokens)
    buffer.steer(others=StateSpecs((LAYERS,)))
    buffer.follow(kept)
    buffer.begin(0 if computed else len(tokens) // 32 * 32)
    if computed:
        buffer.add(len(tokens), {3: rows(0, len(tokens))[:, :1].expand(-1, width)})
    return buffer


def positions(buffer: HiddenStateBuffer, position: int, end: int, number: int = 3) -> list[int]:
    """Return the positions that the rows of a piece tell."""
    found = earlier_states(buffer, EarlierStates(number, position, end))
    assert found.number == number
    told = torch.frombuffer(bytearray(found.rows or bytes(2)), dtype=torch.float16).view(-1, found.width)[:, 0].tolist()
    told = told if found.rows else []
    assert told == list(range(found.position, found.position + len(told)))
    assert len(found.rows) <= PIECE_BYTES
    return [int(each) for each in told]


@given(st.integers(0, 300), st.integers(1, 300), st.booleans())
def test_a_piece_is_what_was_asked_for(position: int, count: int, computed: bool) -> None:
    kept, tokens, end = KeptStates(), text(640), position + count
    buffer = buffer_of(tokens, kept)
    if not computed:
        buffer = buffer_of(list(tokens), kept, computed=False)
    assert positions(buffer, position, end) == list(range(position, end))


def test_pieces_are_bounded_in_positions_and_bytes() -> None:
    assert len(positions(buffer_of(text(1000), KeptStates()), 0, 990)) == MAX_HIDDEN_POSITIONS
    wide = buffer_of(text(320), KeptStates(), width=8192)
    assert positions(wide, 40, 320) == list(range(40, 40 + PIECE_BYTES // 16384))


def test_what_was_dropped_is_left_out_with_all_before_it() -> None:
    kept = KeptStates(max_bytes=4 * 32 * WIDTH * 2)
    buffer = buffer_of(text(320), kept)
    assert positions(buffer, 0, 310) == list(range(192, 310))
    assert positions(buffer, 0, 192) == []


def test_a_read_block_is_dropped_last() -> None:
    kept = KeptStates(max_bytes=10 * 32 * WIDTH * 2)
    buffer = buffer_of(text(320), kept)
    positions(buffer, 0, 64)
    buffer_of(text(256, seed=1), kept)  # needs the room of eight blocks
    assert positions(buffer, 0, 64) == list(range(64))
    assert positions(buffer, 0, 320) == []


@pytest.mark.parametrize("asked", [(0, 64, 9), (0, 321, 3), (0, 16_384, 3), (2**31, 2**31 + 5, 3)])
def test_nothing_is_sent_that_is_not_there(asked: tuple[int, int, int]) -> None:
    """Another kind of states, or positions beyond the text, which stays as it was."""
    buffer = buffer_of(text(320), KeptStates())
    assert positions(buffer, *asked) == []
    assert positions(buffer, 0, 320) == list(range(320))


def test_a_session_that_has_not_begun_has_none() -> None:
    assert positions(HiddenStateBuffer(True, "s", text(64)), 0, 64, 0) == []


def test_requests_wait_behind_few_replies() -> None:
    outbox: asyncio.Queue[object] = asyncio.Queue()
    for _ in range(MAX_QUEUED + 1):
        queue_request(outbox, EarlierStates(0, 0, 64))
    with pytest.raises(InvalidRequest, match="behind"):
        queue_request(outbox, EarlierStates(0, 0, 64))


@pytest.mark.parametrize(("position", "end"), [(5, 5), (5, 3), (0, MAX_EARLIER_POSITIONS + 1)])
def test_limits_of_a_request(position: int, end: int) -> None:
    with pytest.raises(InvalidRequest):
        EarlierStates(0, position, end).check()
