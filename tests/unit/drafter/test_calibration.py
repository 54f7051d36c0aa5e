"""How far a drafter's own numbers are believed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.calibration import Calibration


def shown(share: float, held: float, rank: int = 0, count: int = 400) -> Calibration:
    """A drafter that always says `share`, and holds so often."""
    calibration = Calibration()
    for number in range(count):
        for other in range(rank + 1):
            calibration.record_proposed(other, math.log(share))
        calibration.record_outcome(rank + 1, rank if (number + 1) * held % 1 < held else None)
    return calibration


def test_before_anything_is_known_the_drafter_is_believed() -> None:
    assert Calibration().score(0, math.log(0.3)) == math.log(0.3)


@pytest.mark.parametrize(("share", "held"), [(0.5, 0.8), (0.9, 0.4), (0.5, 0.5)])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_holds_is_learnt_by_rank(share: float, held: float, rank: int) -> None:
    found = math.exp(shown(share, held, rank).score(rank, math.log(share)))
    assert found == pytest.approx(held, abs=0.06)


def test_a_likelier_guess_stays_the_likelier_one() -> None:
    calibration = shown(0.5, 0.8)
    assert calibration.score(0, math.log(0.2)) < calibration.score(0, math.log(0.5)) < math.log(1.0)


@pytest.mark.parametrize("rank", range(8))
def test_a_drafter_that_is_right_about_many_siblings_is_believed(rank: int) -> None:
    percents = (40, 20, 10, 8, 6, 5, 4, 3)
    outcomes = [rank for rank, percent in enumerate(percents) for _ in range(percent)] + [None] * 4
    calibration = Calibration()
    for number in range(2000):
        for other, percent in enumerate(percents):
            calibration.record_proposed(other, math.log(percent / 100))
        calibration.record_outcome(len(percents), outcomes[number * 37 % 100])
    share = percents[rank] / 100
    assert math.exp(calibration.score(rank, math.log(share))) == pytest.approx(share, rel=0.2)


def test_nothing_is_made_certain() -> None:
    assert shown(0.1, 1.0).score(0, math.log(0.9)) < 0.0


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(-50.0, 0.0), st.integers(0, 9), st.one_of(st.none(), st.integers(0, 9)))
    ),
    st.integers(0, 9),
    st.floats(-50.0, 0.0),
)
def test_any_history_gives_a_logarithm_of_a_probability(history, rank: int, logprob: float) -> None:
    calibration = Calibration()
    for offered, share, siblings, held in history:
        calibration.record_proposed(offered, share)
        calibration.record_outcome(siblings, held)
    assert -200.0 < calibration.score(rank, logprob) <= 0.0
