"""Where a tree of guesses grows: always at the likeliest place, never past its limits."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.interface import DraftRequest
from drafter.tree_builder import TreeBuilder
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import ROOT, Guess


def ask_for(
    open_tokens: tuple[int, ...] = (),
    open_parents: tuple[int, ...] = (),
    *,
    branches: int = 2,
    budget: int = 8,
    depth: int = 4,
) -> DraftRequest:
    return DraftRequest(
        "s",
        [1],
        1,
        1,
        depth,
        SamplingParams(temperature=0.0),
        50,
        open_guess=Guess(1, 0, 0, open_tokens, parents=open_parents),
        branches=branches,
        budget=budget,
        depth=depth,
    )


def choices(*shares: float) -> list[tuple[int, float]]:
    return [(token, math.log(share)) for token, share in enumerate(shares)]


def grown(builder: TreeBuilder, shares: dict[int, tuple[float, ...]]) -> TreeBuilder:
    """To the end, each place offering what it is told."""
    for place in builder.expandable_nodes():
        builder.add_choices(place, choices(*shares.get(place, ())))
    while (node := builder.add()) is not None:
        builder.add_choices(node, choices(*shares.get(node, ())))
    return builder


def test_the_likeliest_path_grows_first() -> None:
    builder = grown(TreeBuilder(ask_for(budget=3)), {ROOT: (0.6, 0.4), 0: (0.5, 0.3), 1: (0.9, 0.1)})
    assert (builder.tokens, builder.parents) == ([0, 1, 0], [ROOT, ROOT, 1]), "0.6, 0.4, then 0.36 before 0.3"
    assert builder.path(2) == (1, 0)
    assert math.isclose(builder.score(2), math.log(0.36))


def test_no_place_has_more_children_than_branches_and_none_twice() -> None:
    builder = grown(TreeBuilder(ask_for((0,), (ROOT,), depth=1)), {ROOT: (0.4, 0.3, 0.2)})
    draft = builder.guess()
    assert (draft.tokens, draft.parents) == ((0, 1), (ROOT, ROOT)), "the open guess 0 is one of the two"


def test_an_open_guess_that_is_not_offered_counts_as_little_as_the_last_that_is() -> None:
    builder = TreeBuilder(ask_for((9,), (ROOT,)))
    builder.add_choices(ROOT, choices(0.7, 0.2))
    assert math.isclose(builder.score(0), math.log(0.2))


def test_nothing_is_deeper_than_depth() -> None:
    builder = grown(TreeBuilder(ask_for(depth=2, branches=1)), dict.fromkeys(range(-1, 9), (1.0,)))
    assert builder.tokens == [0, 0]
    builder = TreeBuilder(ask_for((5, 6), (ROOT, 0), depth=2))
    assert builder.expandable_nodes() == [ROOT, 0]
    builder.add_choices(1, choices(1.0))
    assert builder.add() is None


def test_a_score_may_be_asked_for() -> None:
    builder = TreeBuilder(ask_for())
    builder.add_choices(ROOT, choices(0.6, 0.1))
    assert builder.add(math.log(0.5)) == 0
    assert builder.add(math.log(0.5)) is None
    assert builder.add() == 1


def test_what_is_left_is_shared_among_the_levels_to_come() -> None:
    assert TreeBuilder(ask_for(budget=8, depth=4)).level_budget == 2
    assert TreeBuilder(ask_for((5, 6), (ROOT, 0), budget=6, depth=4)).level_budget == 3
    assert TreeBuilder(ask_for((5, 6), (ROOT, 0), budget=1, depth=4)).level_budget == 1
    assert TreeBuilder(ask_for((5, 6), (ROOT, 0), budget=5, depth=2)).level_budget == 5


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_grows_is_the_best_tree_there_is(data: st.DataObject) -> None:
    """Greedy is optimal: no offer that was left out is likelier than one that was taken."""
    branches, budget, depth = (data.draw(st.integers(1, high)) for high in (3, 10, 4))
    share = st.floats(0.01, 1.0)
    shares: dict[int, tuple[float, ...]] = {}
    builder = TreeBuilder(ask_for(branches=branches, budget=budget, depth=depth))
    left: list[float] = []
    taken: list[float] = []

    def offer(place: int) -> None:
        shares[place] = tuple(sorted(data.draw(st.lists(share, max_size=4)), reverse=True))
        builder.add_choices(place, choices(*shares[place]))
        if builder.depth(place) < depth:
            left.extend(builder.score(place) + math.log(s) for s in shares[place][:branches])

    offer(ROOT)
    while (node := builder.add()) is not None:
        taken.append(builder.score(node))
        offer(node)
    for score in taken:
        left.remove(min(left, key=lambda other: abs(other - score)))
    assert len(taken) <= budget
    assert all(earlier >= later - 1e-9 for earlier, later in pairwise(taken)), "likeliest first"
    if len(taken) < budget:
        assert not left
    elif left:
        assert max(left) <= min(taken) + 1e-9
