"""The shape of the code does not get worse: no static measure is above its ceiling. `make shape` prints them all."""

from __future__ import annotations

import warnings

import pytest

from tests.shape import measures
from tests.shape.measures import Measure

NAMES = sorted(measures.ceilings())
# Measured over running services, by `tests/e2e/test_round_shape.py`.
OF_ROUNDS = ("files run in a round", "functions of multiplexed streams run in a round", "functions run in a round")


class CanBeLower(UserWarning):
    """A ceiling above what is needed: `python -m tests.shape --lower` lowers it."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Measure]:
    return {measure.name: measure for measure in measures.static()}


def test_every_measure_has_a_ceiling_and_every_ceiling_a_measure(measured: dict[str, Measure]) -> None:
    assert sorted([*measured, *OF_ROUNDS]) == NAMES


@pytest.mark.filterwarnings("default::tests.unit.repository.test_house_rules.CanBeLower")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_ROUNDS])
def test_nothing_is_above_its_ceiling(measured: dict[str, Measure], name: str) -> None:
    bounds = measures.ceilings()
    measure = measured[name]
    listed = "\n  ".join(measure.found)
    assert not measures.over([measure], bounds), f"{measure.now:g} is above {bounds[name]:g}\n  {listed}"
    for lower, figure in measures.lowered([measure], bounds).items():
        warnings.warn(f"{lower}: the ceiling can be {figure:g}", CanBeLower, stacklevel=1)
