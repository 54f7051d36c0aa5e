"""The shapes of a run, and that every run has an end."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from loadtest.shapes import MAX_SPAWN_RATE, SHAPES, ShapePart, ShapeSchedule, max_duration_s, parts
from outrider.protocol.errors import InvalidRequest


def made(shape: str, users: int = 10, seconds: float = 100, times: float = 3, capacity: int = 16) -> list[ShapePart]:
    return parts(shape, users, seconds, times, capacity, 1000)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_takes_the_time_it_was_given(shape: str) -> None:
    assert sum(part.seconds for part in made(shape)) == pytest.approx(100)
    assert len({part.name for part in made(shape)}) == len(made(shape))


def test_what_each_shape_is() -> None:
    users = {shape: [part.users for part in made(shape)] for shape in SHAPES}
    assert users == {
        "steady": [10],
        "ramp": [2, 4, 5, 7, 9, 10],
        "spike": [10, 30, 10],
        "soak": [10, 10, 10, 10],
        "overload": [10, 48, 10],  # three times what the fleet takes
    }
    assert [part.users for part in made("ramp", users=2)] == [1, 2]
    assert [part.users for part in made("overload", capacity=0)] == [10, 30, 10]


def test_a_peak_has_a_bound() -> None:
    assert max(part.users for part in parts("overload", 10, 100, 3, 16, 48)) == 48
    with pytest.raises(InvalidRequest, match="users is 48, must be at most 47"):
        parts("overload", 10, 100, 3, 16, 47)


def follow(schedule: ShapeSchedule, *, lag_s: float, leaves: bool = True, tick_s: float = 0.5) -> tuple[float, int]:
    """When it was over, and the most users there were; users come and go at its rate, `lag_s` late."""
    now, users, most = 0.0, 0, 0
    wanted: list[tuple[float, int, float]] = []
    while (said := schedule.tick(now, users)) is not None:
        assert 0 < said[1] <= MAX_SPAWN_RATE
        wanted.append((now, *said))
        _, target, rate = next((w for w in reversed(wanted) if w[0] <= now - lag_s), (0.0, users, 1.0))
        step = max(1, int(rate * tick_s))
        users = min(users + step, target) if users < target else max(users - step if leaves else users, target)
        most = max(most, users)
        now += tick_s
    return now, most


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_measures_every_part_with_all_its_users(shape: str) -> None:
    schedule = ShapeSchedule(made(shape), spawn_rate=4, grace_s=30)
    now, most = follow(schedule, lag_s=1.0)
    spans = schedule.spans()
    assert [span.part for span in spans] == made(shape)
    assert most == max(part.users for part in made(shape))
    for span in spans:
        assert span.part.seconds <= span.seconds <= span.part.seconds + 1
    for earlier, later in pairwise(spans):
        assert later.began >= earlier.ended
        if earlier.part.users == later.part.users:
            assert later.began == earlier.ended
        else:
            assert later.began > earlier.ended, "nothing is measured while users come and go"
    assert now < max_duration_s(made(shape), 4, 30)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_ends_though_its_users_do_not_leave(shape: str) -> None:
    rng = random.Random(shape)
    for _ in range(20):
        users, times = rng.randint(1, 40), rng.uniform(1, 5)
        given = made(shape, users, rng.uniform(1, 60), times, rng.randint(0, 64))
        rate, grace_s = rng.uniform(0.5, 50), rng.uniform(0.5, 20)
        now, _ = follow(ShapeSchedule(given, rate, grace_s), lag_s=rng.uniform(0, 5), leaves=False)
        assert now <= max_duration_s(given, rate, grace_s)


def test_a_run_that_was_stopped_has_what_it_had() -> None:
    schedule = ShapeSchedule([ShapePart("before", 2, 10), ShapePart("peak", 6, 10)], spawn_rate=2, grace_s=5)
    assert schedule.spans() == []
    schedule.tick(0, 0)
    schedule.tick(1, 2)
    schedule.tick(4, 2)
    assert [(span.part.name, span.began, span.ended) for span in schedule.spans()] == [("before", 1, 4)]
    schedule.tick(11, 2)
    schedule.tick(12, 3)
    assert [span.part.name for span in schedule.spans()] == ["before"]


def test_users_surge_between_parts() -> None:
    schedule = ShapeSchedule([ShapePart("before", 10, 5), ShapePart("peak", 110, 5)], spawn_rate=2, grace_s=5)
    assert schedule.tick(0, 0) == (10, 2)
    schedule.tick(5, 10)
    assert schedule.tick(10, 10) == (110, 50)
