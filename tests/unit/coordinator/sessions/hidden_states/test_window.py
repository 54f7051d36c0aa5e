"""The newest hidden states that a coordinator keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.sessions.hidden_states.window import WINDOW, HiddenStateWindow
from outrider.protocol.hidden_states.messages import HiddenStates

WIDTH = 3


def rows(first: int, count: int, width: int = WIDTH) -> HiddenStates:
    """Each row tells its position."""
    return HiddenStates(
        first, width, b"".join(position.to_bytes(2, "little") * width for position in range(first, first + count))
    )


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1)), max_size=12))
def test_the_newest_are_kept_without_a_gap(pieces: list[tuple[int, int]]) -> None:
    window = HiddenStateWindow()
    start = end = 0
    for count, gap in pieces:
        if gap:
            start = end = end + gap
        window.add(rows(end, count))
        end += count
        first = max(start, end - WINDOW)
        assert window.contents() == rows(first, end - first)


def test_what_does_not_follow_begins_anew() -> None:
    window = HiddenStateWindow()
    window.add(rows(0, 5))
    window.add(rows(3, 5))
    assert window.contents() == rows(3, 5)
    window.add(rows(8, 2, width=4))
    assert window.contents() == rows(8, 2, width=4)
    window.add(rows(100, 1))
    assert window.contents() == rows(100, 1)


def test_float8_is_kept_as_it_came() -> None:
    window = HiddenStateWindow()
    window.add(rows(0, 1))
    for position in range(WINDOW + 9):
        window.add(HiddenStates(position, WIDTH, bytes([position % 256] * (1 + WIDTH)), 2, True))
    kept = window.contents()
    assert kept is not None
    assert (kept.position, kept.count, kept.number, kept.float8) == (9, WINDOW, 2, True)
    assert kept.rows[: 1 + WIDTH] == bytes([9] * (1 + WIDTH))
