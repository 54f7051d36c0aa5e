"""What the coordinator makes of a guess that it relays."""

from __future__ import annotations

import pytest

from outrider.speculation.tree import depth


@pytest.mark.parametrize(
    ("tokens", "parents", "length"),
    [
        ([], [], 0),
        ([5, 6, 7], [], 3),
        ([5, 6, 7], [0, 0, 0], 1),
        ([5, 6, 7, 8], [0, 1, 1, 3], 3),
        ([5], [7], 1),  # what no honest drafter sends: the verifier will refuse it, here it must do no harm
        ([5], [0, 1, 2], 1),
        ([], [0], 0),
    ],
)
def test_the_length_of_a_guess_is_that_of_its_longest_path(tokens: list[int], parents: list[int], length: int) -> None:
    assert depth(parents, len(tokens)) == length
