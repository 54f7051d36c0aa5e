"""Several drafters on one session: who may guess."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.control.drafter_selection import PROBE_EVERY, PROBE_MAX_STEPS, TRIAL_STEPS, DrafterSelection
from outrider.protocol.speculation import SourceTally

GAMMA = 5


def joined(*sources: int, length: float = 2.0) -> DrafterSelection:
    selection = DrafterSelection()
    for source in sources:
        selection.add(source, length, 1.0)
    return selection


def play(
    selection: DrafterSelection, steps: int, accepted: dict[int, float], rates: dict[int, float] | None = None
) -> list[set]:
    """Per step who might guess; those who might did, as often as `rates` says and as well as `accepted` says."""
    luck = random.Random(1)
    played = []
    for _ in range(steps):
        players = {source for source, gamma in selection.gammas(GAMMA).items() if gamma}
        played.append(players)
        selection.observe(
            SourceTally(source, GAMMA, int(accepted[source] + luck.random()))
            for source in sorted(players)
            if luck.random() < (rates or {}).get(source, 1.0)
        )
    return played


def test_one_alone_always_plays() -> None:
    selection = joined(1)
    assert all(players == {1} for players in play(selection, 100, {1: 0.0}))
    assert selection.gammas(0) == {1: 0}


def test_all_play_until_they_have_been_seen() -> None:
    selection = joined(1, 2)
    assert all(players == {1, 2} for players in play(selection, TRIAL_STEPS - 1, {1: 4.0, 2: 0.0}))


def test_who_is_far_behind_is_benched_and_looked_at_now_and_then() -> None:
    selection = joined(1, 2)
    play(selection, 40, {1: 4.0, 2: 0.3})
    assert selection.best == 1
    played = play(selection, 20 * PROBE_EVERY, {1: 4.0, 2: 0.3})
    share = sum(2 in players for players in played) / len(played)
    assert 1 / PROBE_EVERY <= share <= 4 / PROBE_EVERY
    assert all(1 in players for players in played)


def test_a_look_ends_when_nothing_comes() -> None:
    selection = joined(1, 2)
    play(selection, 40, {1: 4.0, 2: 0.0})
    played = play(selection, 10 * PROBE_EVERY, {1: 4.0, 2: 0.0}, {2: 0.0})
    share = sum(2 in players for players in played) / len(played)
    assert 0 < share <= PROBE_MAX_STEPS / PROBE_EVERY


@pytest.mark.parametrize("second", [2.5, 3.0, 4.0])
def test_who_comes_near_the_best_stays(second: float) -> None:
    selection = joined(1, 2)
    assert all(players == {1, 2} for players in play(selection, 400, {1: 4.0, 2: second}))


def test_who_gets_better_comes_back_and_becomes_the_best() -> None:
    selection = joined(1, 2)
    play(selection, 60, {1: 3.0, 2: 0.2})
    assert selection.gammas(GAMMA)[2] == 0
    play(selection, 3 * PROBE_EVERY, {1: 3.0, 2: 4.5})
    assert selection.gammas(GAMMA) == {1: GAMMA, 2: GAMMA}
    play(selection, 60, {1: 3.0, 2: 4.5})
    assert selection.best == 2
    played = play(selection, 60, {1: 1.0, 2: 4.5})
    assert played[-1] == {2}, "and the one that was the best is benched"


def test_a_rare_long_guess_does_not_bench_the_steady_one() -> None:
    """One has long guesses in every tenth step, the other middling ones in each: both are wanted."""
    selection = joined(1, 2)
    assert all(players == {1, 2} for players in play(selection, 400, {1: 4.9, 2: 2.0}, {1: 0.1}))
    assert selection.best == 2


def test_what_is_expected_decides_who_is_the_best_at_first() -> None:
    selection = DrafterSelection()
    selection.add(1, 3.0, 0.1)
    selection.add(2, 2.0, 0.9)
    assert selection.best == 2


def test_losing_the_best_puts_the_next_in_its_place() -> None:
    selection = joined(1, 2)
    play(selection, 60, {1: 4.0, 2: 0.2})
    assert selection.gammas(GAMMA) == {1: GAMMA, 2: 0}
    selection.remove(1)
    assert (selection.best, selection.gammas(GAMMA)) == (2, {2: GAMMA})
    selection.remove(2)
    assert (selection.best, selection.gammas(GAMMA)) == (None, {})
    selection.observe([SourceTally(2, 3, 3)])  # still on its way when the drafter was lost


def test_near_the_bound_there_is_no_flapping() -> None:
    selection = joined(1, 2)
    played = play(selection, 2000, {1: 3.0, 2: 1.5})
    changes = sum(before != after for before, after in pairwise(played))
    assert changes <= 2 * len(played) / PROBE_EVERY, "no oftener than it is looked at"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=3), max_size=120))
def test_whatever_comes_the_best_plays(steps: list[list[tuple[int, int]]]) -> None:
    selection = joined(1, 2, 3)
    for step in steps:
        selection.observe(SourceTally(source, 9, accepted) for source, accepted in step)
        gammas = selection.gammas(GAMMA)
        assert set(gammas) == {1, 2, 3}
        assert selection.best is not None
        assert gammas[selection.best] == GAMMA
        assert set(gammas.values()) <= {0, GAMMA}
