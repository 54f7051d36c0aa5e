"""Depths and paths of a tree, against a walk from each node to the root."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.protocol.speculation import ROOT, TreeShape, path_to

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
    assert shape.is_chain == (shape.depth == len(shape.parents))
    assert TreeShape.of(shape.stated, len(shape.parents)) == shape


def test_the_root_has_an_empty_path() -> None:
    assert path_to(ROOT, (ROOT, 0)) == []
