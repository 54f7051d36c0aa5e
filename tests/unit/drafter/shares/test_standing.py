"""A session's record: the acceptance of its guesses, from committed tokens alone."""

from __future__ import annotations

import pytest

from drafter.shares.standing import GuessRecord
from outrider.protocol.speculation import Guess

PROMPT = [1, 2, 3]


def chain(committed: list[int], *tokens: int) -> Guess:
    return Guess(len(committed), 0, 0, tokens)


def acceptance(record: GuessRecord) -> float:
    return record.standing(0, 4, awaited=False).acceptance


def followed(*rounds: tuple[tuple[int, ...], tuple[int, ...]]) -> GuessRecord:
    """Return the record after rounds of guessed and then committed tokens."""
    record, committed = GuessRecord(), list(PROMPT)
    for guessed, new in rounds:
        record.follow(committed, chain(committed))
        record.drafts(chain(committed, *guessed))
        committed += new
    record.follow(committed, chain(committed))
    return record


def test_a_new_session_is_neither_trusted_nor_left_out() -> None:
    assert acceptance(GuessRecord()) == 0.5


def test_guesses_that_hold_raise_acceptance_and_a_miss_lowers_it() -> None:
    assert acceptance(followed(*[((7, 8, 9), (7, 8, 9))] * 20)) > 0.9
    assert acceptance(followed(*[((7, 8, 9), (5,))] * 20)) < 0.2


def test_tokens_past_all_guesses_say_nothing() -> None:
    assert acceptance(followed(((), (5,)))) == 0.5
    assert acceptance(followed(((7,), (7, 5)))) == acceptance(followed(((7,), (7,))))


def test_the_first_miss_ends_what_a_guess_shows() -> None:
    assert acceptance(followed(((7, 8, 9), (5, 8, 9)))) == acceptance(followed(((7,), (5,))))


def test_an_accepted_sibling_counts() -> None:
    record = GuessRecord()
    record.drafts(Guess(3, 0, 0, (7, 8), parents=(-1, -1)))
    record.follow([*PROMPT, 8], chain([*PROMPT, 8]))
    assert acceptance(record) > 0.5


def test_pace_is_what_a_commit_brings() -> None:
    record = followed(*[((7, 8, 9), (7, 8, 9, 4))] * 100)
    assert record.standing(0, 4, awaited=False).pace == pytest.approx(4.0, abs=0.1)
    record = followed(*[((7,), (5,))] * 100)
    assert record.standing(0, 4, awaited=False).pace == pytest.approx(1.0)
