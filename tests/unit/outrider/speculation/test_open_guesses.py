"""Open guesses: what commits leave of them, and what is sent of them."""

from __future__ import annotations

from outrider.protocol.speculation import MAX_GAMMA, Guess
from outrider.speculation.open_guesses import OpenGuesses


def opened(*tokens: int, parents: tuple[int, ...] = (), position: int = 3) -> OpenGuesses:
    guesses = OpenGuesses(position)
    guesses.extend(Guess(position, 0, 0, tokens, parents=parents), ())
    return guesses


def test_a_commit_keeps_what_follows_it() -> None:
    guesses = opened(7, 8, 9, 4, parents=(-1, -1, 0, 1))
    assert guesses.commit((8,)) == [(2, 1)], "the second of two"
    assert guesses.guess == Guess(4, 0, 0, (4,))
    assert guesses.commit((5, 6)) == [(1, None)]
    assert guesses.guess == Guess(6, 0, 0, ())


def test_what_was_drafted_from_an_earlier_position_is_moved_forward() -> None:
    guesses = opened(7, 8)
    drafted = Guess(3, 0, 0, (7, 8, 9, 5), parents=(-1, 0, 1, -1))
    guesses.commit((7,))
    guesses.extend(drafted, (7,))
    assert guesses.guess == Guess(4, 0, 0, (8, 9))


def test_each_subtree_is_sent_once_and_hangs_from_what_was_sent() -> None:
    guesses = opened(7, 8, parents=(-1, -1))
    assert guesses.take_unsent(20) == Guess(3, 1, 0, (7, 8), draft_us=20, parents=(-1, -1))
    assert guesses.take_unsent(20) is None
    guesses.extend(Guess(3, 0, 0, (7, 8, 1, 2, 3), parents=(-1, -1, 0, 1, 2)), ())
    assert guesses.take_unsent(30) == Guess(4, 3, 1, (1, 3), draft_us=30)
    assert guesses.take_unsent(0) == Guess(4, 5, 2, (2,))
    assert guesses.commit((8, 2)) == [(2, 1), (1, 0)]
    guesses.extend(Guess(5, 0, 0, (6,)), ())
    assert guesses.take_unsent(0) == Guess(5, 6, 0, (6,))
    assert guesses.take_unsent(0) is None


def test_a_message_has_a_bounded_number_of_tokens() -> None:
    guesses = opened(*range(MAX_GAMMA + 5))
    first, rest = guesses.take_unsent(0), guesses.take_unsent(0)
    assert first is not None
    assert rest is not None
    assert (len(first.tokens), len(rest.tokens), rest.parent) == (MAX_GAMMA, 5, MAX_GAMMA)
