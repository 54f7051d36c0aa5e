"""A shared step checks the guesses that bring most for its time, and slows no session down."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import Guess
from outrider.speculation.goodput import compared_guesses, new_pace, paying_blocks, paying_guesses
from outrider.speculation.tree import GuessTree

FLAT = CostCurve((1, 64, 128), (25.0, 25.0, 50.0))
GENTLE = CostCurve((1, 2), (10.0, 10.5))
FREE = CostCurve((1, 2), (10.0, 10.0))
LUCKY = (4.0, 4.0, 4.0)  # paces that allow any step


def expected(chances: Sequence[Sequence[float]], taken: Sequence[int], tokens: int, cost: CostCurve) -> float:
    total = len(chances) + sum(sum(own[:number]) for own, number in zip(chances, taken, strict=True))
    return total / cost.at(tokens + sum(taken))


def test_what_takes_no_time_is_checked() -> None:
    assert paying_guesses([(0.5, 0.01), (), (0.9,)], (1.0,) * 3, 3, FREE) == [2, 0, 1]
    assert paying_guesses([(0.3,) * 8] * 6, (1.0,) * 6, 6, FLAT) == [8] * 6, "54 tokens of 64"


def test_places_that_are_few_go_to_the_likeliest() -> None:
    good, poor = (0.9, 0.81, 0.73, 0.66), (0.3, 0.09, 0.03, 0.01)
    taken = paying_guesses([good, poor] * 15, (1.0,) * 30, 30, FLAT)
    assert sum(taken) == 34
    assert set(taken[::2]) <= {2, 3}
    assert set(taken[1::2]) == {0}


def test_nothing_is_checked_where_a_guess_costs_as_much_as_a_token() -> None:
    assert paying_guesses([(0.9, 0.8)] * 128, (2.0,) * 128, 128, FLAT) == [0] * 128


def test_a_session_without_guesses_is_not_slowed_down() -> None:
    chances = [(0.9, 0.8), (0.9, 0.8), ()]
    assert sum(paying_guesses(chances, LUCKY, 3, GENTLE)) == 4
    assert paying_guesses(chances, (2.0, 2.0, 1.0), 3, GENTLE) == [0, 0, 0]
    assert sum(paying_guesses(chances, (2.0, 2.0, 1.1), 3, GENTLE)) > 0, "its earlier guesses held"


own_chances = st.lists(st.floats(0.01, 0.99), max_size=3).map(lambda found: sorted(found, reverse=True))


@given(st.lists(own_chances, min_size=3, max_size=3), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_no_other_choice_brings_more(chances: list[list[float]], slope: float, later: float) -> None:
    cost = CostCurve((1, 6, 12), (10.0, 10.0 + 5 * slope, 10.0 + 5 * slope + 6 * (slope + later)))
    taken = paying_guesses(chances, LUCKY, 3, cost)
    best = max(
        expected(chances, other, 3, cost) for other in itertools.product(*(range(len(own) + 1) for own in chances))
    )
    assert expected(chances, taken, 3, cost) == pytest.approx(best)


class Stepping:
    """A session with a chain of guesses, of which so many held so far."""

    def __init__(self, length: int, paying: int, held: bool = True) -> None:
        committed = [1]
        self.tree = GuessTree(committed, single=False, max_nodes=64, max_ahead=64)
        self.pace, self.paying_guesses = new_pace(), paying
        for position in range(1, 31):
            self.tree.add(Guess(position, position, 0, (7,)))
            committed.append(7 if held else 8)
            self.tree.commit(committed[-1:])
        self.tree.add(Guess(31, 31, 0, tuple(range(length))))

    @property
    def block(self) -> Guess:
        return self.tree.block(16, 16)


def test_sessions_whose_guesses_hold_get_the_places() -> None:
    good, poor, other = Stepping(8, 32), Stepping(8, 32, held=False), Stepping(3, 0)
    sessions = [good, poor, other]
    blocks = [session.block for session in sessions]
    narrow = CostCurve((1, 12, 24), (25.0, 25.0, 50.0))
    after = paying_blocks(sessions, blocks, 3 + 8 + 8 + 3, narrow)
    assert after[0].tokens == blocks[0].tokens[: len(after[0].tokens)]
    assert (len(after[0].tokens), after[1].tokens) == (6, ())
    assert after[2] is blocks[2], "it was not asked to share"
    assert paying_blocks(sessions, blocks, 22, FLAT) == blocks


def test_the_comparison_is_bounded() -> None:
    assert [compared_guesses(sessions) for sessions in (1, 8, 32, 64, 512)] == [256, 32, 8, 4, 4]
