"""The cost of a step is a line through the latest steps."""

from __future__ import annotations

import pytest

from drafter.shares.step_cost import StepCost


def measured(*steps: tuple[int, float]) -> StepCost:
    cost = StepCost()
    for sessions, ms in steps:
        cost.add(sessions, ms)
    return cost


def test_steps_of_one_size_tell_nothing_about_others() -> None:
    assert StepCost().curve is None
    assert measured(*[(8, 20.0)] * 50).curve is None


def test_steps_of_several_sizes_give_a_line() -> None:
    curve = measured(*[(4, 12.0), (8, 20.0)] * 5).curve
    assert curve is not None
    assert [curve.at(sessions) for sessions in (1, 4, 8, 16)] == pytest.approx([6.0, 12.0, 20.0, 36.0])


def test_what_was_measured_long_ago_is_forgotten() -> None:
    cost = measured(*[(4, 100.0), (8, 100.0)] * 100, *[(4, 12.0), (8, 20.0)] * 1500)
    assert cost.curve is not None
    assert cost.curve.at(8) == pytest.approx(20.0, rel=0.02)


def test_a_size_that_is_used_alone_becomes_unknown_again() -> None:
    cost = measured((4, 12.0), (8, 20.0))
    assert cost.curve is not None
    for _ in range(2000):
        cost.add(8, 20.0)
    assert cost.curve is None


def test_larger_steps_are_never_taken_for_shorter_ones() -> None:
    curve = measured(*[(4, 30.0), (8, 20.0)] * 5).curve
    assert curve is not None
    assert curve.at(8) == pytest.approx(curve.at(4))


def test_one_step_that_was_held_up_changes_little() -> None:
    cost = measured(*[(4, 12.0), (8, 20.0)] * 50)
    cost.add(8, 5_000.0)
    assert cost.curve is not None
    assert cost.curve.at(8) == pytest.approx(20.0, rel=0.1)
