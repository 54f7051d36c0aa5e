"""Decayed means: how much a measurement counts."""

from __future__ import annotations

import pytest

from outrider.base.decayed_mean import DecayedMean


def test_the_latest_measurements_count_most() -> None:
    mean = DecayedMean(0.02, 0.4, trials=10.0)
    for _ in range(300):
        mean.add(True)
    assert mean.value > 0.95
    for _ in range(300):
        mean.add(False)
    assert mean.value < 0.05


def test_a_measurement_counts_its_weight() -> None:
    mean = DecayedMean(0.25, 8.0)
    for expected in (6.0, 4.5, 3.375):
        mean.add(0.0)
        assert mean.value == pytest.approx(expected)


def test_without_a_start_the_first_measurement_is_the_mean() -> None:
    mean = DecayedMean(0.25)
    assert (mean.known, mean.value) == (False, 0.0)
    mean.add(8.0)
    assert (mean.known, mean.value) == (True, 8.0)
    mean.add(0.0)
    assert mean.value == pytest.approx(6.0)


def test_a_start_that_stands_for_nothing_leaves_the_mean_of_the_measurements() -> None:
    mean = DecayedMean(0.5, 100.0, trials=0.0)
    for value in (4.0, 1.0, 7.0):
        mean.add(value)
    assert mean.value == pytest.approx((4.0 * 0.25 + 1.0 * 0.5 + 7.0) / 1.75)
    assert mean.trials == pytest.approx(1.75)


def test_a_measurement_can_count_otherwise() -> None:
    mean = DecayedMean(0.1, 0.0)
    mean.add(8.0, weight=0.5)
    assert mean.value == 4.0
