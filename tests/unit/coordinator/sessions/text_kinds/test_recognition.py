"""The kind of a text, from its temperature, its prompt, and what its answer repeats."""

from __future__ import annotations

import random

import pytest

from coordinator.persistence.session_record import SessionRequest
from coordinator.sessions.text_kinds import recognition
from coordinator.sessions.text_kinds.recognition import FIRST_READ, READ_EVERY, TextRecogniser
from outrider.protocol.sampling_params import SamplingParams


def text(prompt: list[int], temperature: float = 0.0) -> TextRecogniser:
    return TextRecogniser(SessionRequest(tuple(prompt), SamplingParams(temperature=temperature)))


def words(count: int, seed: int = 0) -> list[int]:
    """Tokens as rare as words: three in a row hardly ever come again."""
    drawn = random.Random(seed)
    return [drawn.randrange(5_000) for _ in range(count)]


@pytest.mark.parametrize(
    ("length", "temperature", "kind"),
    [(20, 0.0, "cold short"), (20, 1.0, "warm short"), (200, 0.3, "cold long"), (200, 0.7, "warm long")],
)
def test_before_the_answer_the_length_of_the_prompt_and_the_temperature_tell(
    length: int, temperature: float, kind: str
) -> None:
    assert text(words(length), temperature).kind == kind
    assert text(words(length), temperature).start == kind


@pytest.mark.parametrize("begun", [0, 8], ids=["at once", "after other words"])
def test_an_answer_that_copies_its_prompt_is_recognised_within_two_looks(begun: int) -> None:
    prompt = words(300)
    made = text(prompt)
    answer = words(begun, seed=1) + prompt[40:240]
    looks = [made.read(answer[:length]) for length in range(READ_EVERY, 4 * READ_EVERY, READ_EVERY)]
    assert made.kind == "cold copy"
    assert any(looks[:2])
    assert sum(looks) <= 2, "a change is told once"


def test_an_answer_of_its_own_is_fresh_and_one_that_turns_is_followed() -> None:
    prompt = words(300)
    made = text(prompt, temperature=1.0)
    answer = words(200, seed=1)
    assert made.read(answer[:READ_EVERY])
    assert made.kind == "warm fresh"
    answer += prompt[:64]
    assert made.read(answer)
    assert made.kind == "warm copy"
    assert made.read(answer + words(64, seed=2))
    assert made.kind == "warm fresh"


def test_between_copying_and_not_the_kind_stays_what_it_was() -> None:
    prompt = words(2_000)
    made = text(prompt)
    answer = prompt[:64]
    made.read(answer)
    turns = 0
    for start in range(100, 1_900, 8):  # half of the tokens are repeated
        answer += prompt[start : start + 6] + words(2, seed=start)
        turns += len(answer) >= made.due and made.read(answer)
    assert turns == 0


def test_an_answer_that_repeats_itself_copies() -> None:
    made = text(words(10))
    made.read(words(12, seed=1) * 8)
    assert made.kind == "cold copy"


def test_what_is_kept_of_a_long_text_is_bounded() -> None:
    made = text(words(100_000))
    for length in range(READ_EVERY, 20_000, 1_000):
        made.read(words(length, seed=1))
    assert len(made._known) <= recognition._MAX_KNOWN
    assert made.kind == "cold fresh"


def test_looks_are_some_tokens_apart() -> None:
    made = text(words(10))
    assert made.due == FIRST_READ
    made.read(words(FIRST_READ + 3, seed=1))
    assert made.due == FIRST_READ + 3 + READ_EVERY


def test_a_copy_is_recognised_at_the_first_look() -> None:
    prompt = words(300)
    made = text(prompt)
    assert made.read(prompt[40 : 40 + FIRST_READ])
    assert made.kind == "cold copy"
