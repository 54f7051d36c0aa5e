"""Depths and paths of a tree, against a walk from each node to the root."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.protocol.speculation import NO_GUESS, ROOT, Guess, TreeShape, path_to

shapes = st.lists(st.integers(0, 100), max_size=24).map(
    lambda drawn: TreeShape(tuple(number % (i + 1) - 1 for i, number in enumerate(drawn)))
)


@pytest.mark.parametrize(
    ("parents", "num_tokens", "depth"),
    [
        ((), 0, 0),
        ((), 3, 3),
        ((ROOT, 0, 1), 3, 3),
        ((ROOT, ROOT, ROOT), 3, 1),
        ((ROOT, ROOT, 0, 2), 4, 3),
    ],
)
def test_depth_is_the_length_of_the_longest_path(parents: tuple[int, ...], num_tokens: int, depth: int) -> None:
    assert TreeShape.of(parents, num_tokens).depth == depth


@given(shapes)
def test_depths_and_paths_follow_the_parents(shape: TreeShape) -> None:
    tokens = [100 + node for node in range(len(shape.parents))]
    paths = shape.token_paths(tokens)
    for node, parent in enumerate(shape.parents):
        nodes = path_to(node, shape.parents)
        assert nodes[-1] == node
        assert len(nodes) == shape.depths[node] == 1 + (shape.depths[parent] if parent >= 0 else 0)
        assert list(paths[node]) == [tokens[each] for each in nodes]
    assert shape.depth == max(map(len, paths), default=0)


@given(shapes)
def test_only_chains_state_no_parents(shape: TreeShape) -> None:
    guess = Guess(0, 1, 0, (7,) * len(shape.parents), parents=shape.parents)
    assert (not guess.parents) == (shape.depth == len(shape.parents))
    assert guess.shape == shape


def test_the_root_has_an_empty_path() -> None:
    assert path_to(ROOT, (ROOT, 0)) == []


@given(shapes, st.data())
def test_a_part_of_a_guess_has_the_ends_of_its_paths(shape: TreeShape, data: st.DataObject) -> None:
    tokens = tuple(100 + node for node in range(len(shape.parents)))
    guess = Guess(5, 1, 0, tokens, parents=shape.parents)
    top = data.draw(st.integers(ROOT, len(tokens) - 1))
    start = guess.paths[top + 1]
    part = guess.part(top, shape.below(top, range(len(tokens))))
    assert part.position == 5 + len(start)
    assert part.paths[1:] == [
        path[len(start) :] for path in guess.paths if len(path) > len(start) and path[: len(start)] == start
    ]


@given(shapes)
def test_every_path_is_walked_to_its_end(shape: TreeShape) -> None:
    tokens = tuple(100 + node for node in range(len(shape.parents)))
    guess = Guess(5, 1, 0, tokens, parents=shape.parents)
    for node, path in enumerate(guess.paths, start=ROOT):
        assert guess.walk(path) == (node, len(path))
        assert guess.walk((*path, 7)) == (node, len(path)), "7 is nowhere"
    assert len(guess.paths[guess.tip + 1]) == shape.depth


def test_among_the_longest_paths_the_first_one_has_the_tip() -> None:
    assert Guess(0, 1, 0, (5, 6, 7, 8), parents=(ROOT, ROOT, 0, 1)).tip == 2
    assert NO_GUESS.tip == ROOT
