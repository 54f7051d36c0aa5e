"""Models that mean different things by the same ids are never paired."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.errors import InvalidRequest, ModelMismatch
from outrider.protocol.vocabulary import Vocabulary, check_same_vocabulary
from outrider.testing.toy_models import byte_tokenizer

TARGET = Vocabulary(("a", "b", "c", "", "d"))


def check(drafter: Sequence[str], *, first_id: int = 0, last: bool = True, target: Vocabulary = TARGET) -> None:
    check_same_vocabulary(target, first_id, drafter, last=last)


def refusal(drafter: Sequence[str], **where) -> ModelMismatch:
    with pytest.raises(ModelMismatch) as refused:
        check(drafter, **where)
    return refused.value


def test_equal_vocabularies_are_fine() -> None:
    check(TARGET.tokens)


def test_equal_vocabularies_in_pieces_are_fine() -> None:
    check(TARGET.tokens[:2], last=False)
    check(TARGET.tokens[2:], first_id=2)


def test_an_empty_last_piece_ends_a_whole_vocabulary() -> None:
    check(TARGET.tokens, last=False)
    check((), first_id=5)


def test_the_first_difference_is_named_with_both_tokens() -> None:
    error = refusal(("a", "x", "y", "", "d"))
    assert error.field == "vocabulary[1]"
    assert (error.value, error.limit) == ("'x'", "'b'")
    assert "id 1" in error.message
    assert "'x'" in error.message
    assert "'b'" in error.message


def test_ids_count_from_the_start_of_a_piece() -> None:
    assert refusal(("c", "z"), first_id=2).field == "vocabulary[3]"


def test_an_extra_token_is_named() -> None:
    error = refusal((*TARGET.tokens, "e"))
    assert (error.field, error.value, error.limit) == ("vocabulary[5]", "'e'", "no such id")


def test_a_missing_token_is_named() -> None:
    error = refusal(TARGET.tokens[:4])
    assert (error.field, error.value, error.limit) == ("vocabulary[4]", "no such id", "'d'")


def test_an_empty_vocabulary_lacks_the_first_token() -> None:
    assert refusal(()).field == "vocabulary[0]"


def test_a_piece_that_is_not_the_last_may_end_early() -> None:
    check(TARGET.tokens[:4], last=False)


def test_a_gap_is_not_a_token() -> None:
    assert refusal(("a", "b", "c", "filled", "d")).field == "vocabulary[3]"


def test_a_long_token_is_not_echoed_whole() -> None:
    assert len(refusal(("x" * 100_000,)).value) < 1000


def test_a_map_becomes_tokens_by_id() -> None:
    assert Vocabulary.of(SimpleNamespace(get_vocab=lambda: {"c": 2, "a": 0, "d": 4, "b": 1})) == TARGET
    assert Vocabulary.of(SimpleNamespace(get_vocab=dict)).tokens == ()


def test_a_token_with_a_far_id_takes_no_gigabytes() -> None:
    """A file of a few bytes names any id, and a coordinator reads those of its verifiers."""
    with pytest.raises(InvalidRequest, match="one with the id 300000000"):
        Vocabulary.of(SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 300_000_000}))


def test_a_tokenizers_added_tokens_count() -> None:
    plain, more = Vocabulary.of(byte_tokenizer()), Vocabulary.of(byte_tokenizer(("<new>",)))
    assert more.tokens == (*plain.tokens, "<new>")
    assert plain.digest != more.digest


token_lists = st.lists(st.text(max_size=4), max_size=8).map(tuple)


@settings(deadline=None)
@given(token_lists, token_lists)
def test_digests_are_equal_only_for_equal_vocabularies(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (Vocabulary(one).digest == Vocabulary(other).digest) == (one == other)


def test_a_digest_sees_where_tokens_end() -> None:
    assert Vocabulary(("ab", "c")).digest != Vocabulary(("a", "bc")).digest


def test_a_digest_is_stable() -> None:
    assert TARGET.digest == "c55f31e8f63a7f84c7bf1ebc42f01c78"


@settings(deadline=None)
@given(token_lists, token_lists)
def test_a_whole_drafter_passes_only_if_equal(target: tuple[str, ...], drafter: tuple[str, ...]) -> None:
    if target == drafter:
        check(drafter, target=Vocabulary(target))
        return
    error = refusal(drafter, target=Vocabulary(target))
    first = next(i for i in range(99) if target[i : i + 1] != drafter[i : i + 1])
    assert error.field == f"vocabulary[{first}]"
