"""Earlier states at a drafter: they wait until they reach the first ones; gaps and floods of them change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.hidden_states.earlier_states import MAX_AWAITING, StateQueue, earlier_positions
from outrider.protocol.hidden_states.earlier_states import MAX_EARLIER_POSITIONS
from outrider.protocol.hidden_states.messages import MAX_HIDDEN_POSITIONS, HiddenStates

WANTED = 4096


def states(first: int, end: int) -> HiddenStates:
    """Each row of one number tells its position."""
    return HiddenStates(first, 1, b"".join(position.to_bytes(2, "little") for position in range(first, end)))


def positions(parts: tuple[HiddenStates, ...]) -> list[int]:
    """Return the positions that rows tell, which must be those of their parts."""
    told = [int.from_bytes(part.rows[at : at + 2], "little") for part in parts for at in range(0, len(part.rows), 2)]
    assert told == [part.position + i for part in parts for i in range(part.count)]
    return told


@given(st.integers(1, 1500), st.integers(1, 300), st.lists(st.integers(1, 7), max_size=40), st.integers(1, 255))
def test_pieces_between_commits_end_in_everything(first: int, window: int, commits: list[int], piece: int) -> None:
    """Taken or not meanwhile, the drafter begins again from position 0 exactly once, with nothing missing."""
    queue, end, sent, whole = StateQueue(WANTED), first + window, 0, []
    queue.add(states(first, end))
    for new in [*commits, *[1] * (1 + first // piece)]:
        if sent < first:
            until = min(first, sent + piece)
            queue.add_earlier(states(sent, until))
            sent = until
        else:
            queue.add_earlier(states(0, min(piece, first)))  # too late: it has them
        queue.add(states(end, end + new))
        end += new
        taken = queue.take()
        if taken[0].position == 0:
            whole.append(positions(taken))
    assert [len(found) for found in whole] == [whole[0][-1] + 1]
    assert whole[0] == list(range(len(whole[0])))


def test_without_a_wish_only_the_newest_positions_are_kept() -> None:
    queue = StateQueue(0)
    queue.add(states(0, 400))
    queue.add(states(400, 600))
    queue.add_earlier(states(0, 400))
    assert positions(queue.take()) == list(range(400, 600))
    assert queue.take() == ()


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 50), (51, 99)],  # a gap, and too short
        [(0, 50), (50, 101)],  # beyond the first one that came
        [(100, 110)],
        [(0, 50), (40, 99)],
    ],
)
def test_pieces_that_do_not_fit_change_nothing(pieces: list[tuple[int, int]]) -> None:
    queue = StateQueue(WANTED)
    queue.add(states(100, 110))
    for piece in pieces:
        queue.add_earlier(states(*piece))
    queue.add(states(110, 112))
    assert positions(queue.take()) == list(range(100, 112))


def test_of_pieces_with_a_gap_the_last_ones_count() -> None:
    queue = StateQueue(WANTED)
    queue.add(states(100, 110))
    for piece in ((0, 50), (51, 60), (60, 100)):
        queue.add_earlier(states(*piece))
    assert positions(queue.take()) == list(range(51, 110))


def test_more_than_was_asked_for_is_dropped() -> None:
    queue = StateQueue(99)
    queue.add(states(100, 110))
    queue.add_earlier(states(0, 100))
    assert positions(queue.take()) == list(range(100, 110))


def test_what_waits_is_bounded() -> None:
    """Earlier states that do not come cost a session the memory of so many positions, and then none."""
    queue = StateQueue(WANTED)
    for at in range(100, 100 + 2 * MAX_AWAITING, 8):
        queue.add(states(at, at + 8))
        assert sum(part.count for part in queue._since) <= MAX_AWAITING
    queue.add_earlier(states(0, 100))
    assert queue._since == queue._earlier == []
    assert len(positions(queue.take())) == MAX_HIDDEN_POSITIONS


def test_a_gap_begins_again() -> None:
    queue = StateQueue(WANTED)
    queue.add(states(50, 60))
    queue.add_earlier(states(0, 20))
    queue.add(states(80, 90))
    queue.add_earlier(states(20, 50))  # of before the gap
    queue.take()
    for piece in ((0, 40), (40, 80)):
        queue.add_earlier(states(*piece))
    queue.add(states(90, 91))
    assert positions(queue.take()) == list(range(91))


def test_a_drafter_that_reads_one_state_asks_for_none() -> None:
    reader = type("Reader", (), {"reads_context": True})()
    assert earlier_positions(reader, 65_536) == 4096
    assert earlier_positions(reader, 1 << 30) == MAX_EARLIER_POSITIONS
    assert earlier_positions(type("Medusa", (), {"reads_context": False})(), 65_536) == 0
    assert earlier_positions(object(), 65_536) == 0
