"""The counting automaton against a search through the whole text, and the drafter that reads it."""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.interface import DraftRequest
from drafter.methods.suffix import SuffixDrafter, _SessionText
from drafter.methods.suffix_automaton import LONGEST, ROOT, Automaton
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution, Guess

VOCAB = 50
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def automaton(tokens: list[int]) -> Automaton:
    made = Automaton()
    made.extend(tokens)
    return made


def ends(text: list[int], run: list[int]) -> list[int]:
    """Where a run ends in a text."""
    return [end for end in range(len(run), len(text) + 1) if text[end - len(run) : end] == run]


def followers(text: list[int], run: list[int]) -> Counter[int]:
    return Counter(text[end] for end in ends(text, run) if end < len(text))


def latest_of_the_most_frequent(text: list[int], run: list[int]) -> int:
    counts = followers(text, run)
    most = max(counts.values())
    return next(text[end] for end in reversed(ends(text, run)) if end < len(text) and counts[text[end]] == most)


# --- the automaton ---------------------------------------------------------------------------------------------------


def check_place(text: list[int], made: Automaton, context: list[int], place: tuple[int, int]) -> None:
    longest = max(n for n in range(len(context) + 1) if n == 0 or (n <= LONGEST and ends(text, context[-n:])))
    assert place[1] == longest
    followed = max(n for n in range(longest + 1) if n == 0 or followers(text, context[-n:]))
    known = made.longest_followed(place)
    assert known[1] == followed
    if not followed:
        return
    run = context[-followed:]
    counts = followers(text, run)
    assert made.most_frequent(known) == (
        latest_of_the_most_frequent(text, run),
        max(counts.values()),
        counts.total(),
    )
    assert dict(made.continuations(known, 99)) == dict(counts)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, context=TEXTS)
def test_the_longest_match_is_found_and_its_continuations_are_counted(text: list[int], context: list[int]) -> None:
    made = automaton(text)
    check_place(text, made, context, made.locate(context))
    check_place(text, made, text, made.end)
    onwards = text + context
    place = made.end
    for token in context:
        place = made.advance(place, token)
    check_place(text, made, onwards, place)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, more=TEXTS, context=TEXTS)
def test_a_place_stays_true_while_the_text_grows(text: list[int], more: list[int], context: list[int]) -> None:
    """States are split under whoever stands there."""
    made = automaton(text)
    place = made.locate(context)
    run = context[len(context) - place[1] :]
    made.extend(more)
    known = made.longest_followed(place)
    counts = followers(text + more, run[len(run) - known[1] :])
    if known != (ROOT, 0):
        assert dict(made.continuations(known, 99)) == dict(counts)
        assert not followers(text + more, run[len(run) - known[1] - 1 :]) or known[1] == len(run)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_runs_longer_than_the_longest_are_cut(data: st.DataObject) -> None:
    period = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
    text = (period * 200)[: data.draw(st.integers(LONGEST, 3 * LONGEST))]
    text[data.draw(st.integers(0, len(text) - 1))] = 2
    made = automaton(text)
    check_place(text, made, text, made.end)
    check_place(text, made, [*text[:-1], 1], made.locate([*text[:-1], 1]))


def words(count: int, seed: int = 0) -> list[int]:
    """Something like text: words by rank, phrases that come back."""
    draw = random.Random(seed)
    text: list[int] = []
    while len(text) < count:
        if len(text) > 100 and draw.random() < 0.3:
            start = draw.randrange(len(text) - 50)
            text += text[start : start + draw.randrange(5, 40)]
        else:
            text.append(int(draw.paretovariate(0.7)) % 5000)
    return text[:count]


TEXT_KINDS = {
    "words": words(20_000),
    "one token": [7] * 20_000,
    "a loop": [1, 2, 3, 1, 2, 4] * 3_300,
    "noise": [random.Random(1).randrange(3) for _ in range(20_000)],
    "fibonacci": [len(bin(n & (n << 1))) & 1 for n in range(20_000)],
}


class CountedLinks(array):
    """Suffix links that count how often one is followed, which is the cost of all that an automaton does."""

    followed = 0

    def __getitem__(self, state: int) -> int:
        self.followed += 1
        return super().__getitem__(state)


def counted(made: Automaton) -> CountedLinks:
    """Replace an automaton's links by the same ones, counted from now on."""
    made._link = CountedLinks("i", made._link)
    return made._link


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_a_token_costs_a_constant_number_of_steps(kind: str) -> None:
    """However long the text is and however much it repeats itself."""
    text = TEXT_KINDS[kind]
    made = automaton(text[:1000])
    for start in range(1000, len(text) - 1000, 1000):
        links = counted(made)
        made.extend(text[start : start + 1000])
        assert links.followed < 1000 * (2 * (LONGEST + 2) + 6)
    assert len(made._length) <= 2 * made.size


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_a_guess_costs_a_constant_number_of_steps(kind: str) -> None:
    text = TEXT_KINDS[kind]
    drafter = SuffixDrafter(0, 2.0, 0.1)
    for committed in range(500, len(text), 1_777):
        while committed > drafter._texts.setdefault("s", _SessionText("")).automaton.size:
            drafter.draft([ask_for(text[:committed], max_new_tokens=0)])
        made = drafter._texts["s"].automaton
        links = counted(made)
        drafter.draft([ask_for(text[:committed], max_new_tokens=16)])
        assert links.followed <= 16 * (LONGEST + 4)


# --- the drafter -----------------------------------------------------------------------------------------------------


def ask_for(tokens: list[int], max_new_tokens: int = 4, committed: int | None = None, **more) -> DraftRequest:
    committed = len(tokens) if committed is None else committed
    fields = {name: more.pop(name) for name in list(more) if name in DraftRequest.__dataclass_fields__}
    known = Guess(committed, 0, 0, tuple(tokens[committed:]))
    fields = {"session": "s", "prompt_length": 1, "open_guess": known} | fields
    return DraftRequest(
        tokens=tokens,
        committed=committed,
        max_new_tokens=max_new_tokens,
        params=SamplingParams(**more),
        vocab_size=VOCAB,
        **fields,
    )


def drafted(tokens: list[int], max_new_tokens: int = 4, factor: float = 4.0, certainty: float = 0.05, **more) -> Guess:
    return SuffixDrafter(0, factor, certainty).draft([ask_for(tokens, max_new_tokens, **more)])[0]


def test_what_followed_before_is_guessed_again() -> None:
    assert drafted([1, 2, 3, 4, 5, 6, 9, 1, 2]).tokens == (3, 4, 5, 6)


def test_the_longest_match_wins() -> None:
    assert drafted([7, 1, 2, 40, 8, 1, 2, 41, 9, 7, 1, 2], max_new_tokens=1).tokens == (40,)


def test_the_most_frequent_continuation_wins_and_of_equals_the_latest() -> None:
    assert drafted([1, 2, 40, 1, 2, 40, 9, 1, 2, 41, 8, 1, 2], max_new_tokens=1).tokens == (40,)
    assert drafted([1, 2, 40, 9, 1, 2, 41, 8, 1, 2], max_new_tokens=1).tokens == (41,)


def test_a_loop_is_continued_as_a_loop() -> None:
    assert drafted([5, 6, 7, 5, 6, 7, 5, 6], max_new_tokens=7).tokens == (7, 5, 6, 7, 5, 6, 7)
    assert drafted([9, 5, 5, 5], max_new_tokens=5).tokens == (5, 5, 5, 5, 5)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5]])
def test_without_a_match_the_drafter_is_done(tokens: list[int]) -> None:
    guess = drafted(tokens)
    assert (guess.tokens, guess.done) == ((), True)


def test_a_longer_match_is_trusted_further() -> None:
    text = [*range(20), 30]
    assert len(drafted([*text, 4, 5], max_new_tokens=16, factor=1.0).tokens) == 2
    assert len(drafted([*text, 1, 2, 3, 4, 5, 6], max_new_tokens=16, factor=1.0).tokens) == 6
    assert len(drafted([*text, 1, 2, 3, 4, 5, 6], max_new_tokens=16, factor=1.5).tokens) == 9
    assert len(drafted([*text, 1, 2, 3, 4, 5, 6], max_new_tokens=3, factor=1.5).tokens) == 3


def test_the_guess_ends_where_the_past_was_of_two_minds() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 9, 1, 2]
    assert drafted(text, certainty=0.6, factor=9.0).tokens == (3,)
    assert len(drafted(text, certainty=0.05, factor=9.0).tokens) == 4


def test_more_is_expected_of_what_has_always_held() -> None:
    drafter = SuffixDrafter(0, 4.0, 0.05)
    once = drafter.propose(ask_for([1, 2, 3, 9, 1, 2], session="a", max_new_tokens=1)).expected
    often = drafter.propose(ask_for([1, 2, 3, 9] * 5 + [1, 2], session="b", max_new_tokens=1)).expected
    torn = drafter.propose(ask_for([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], session="c", max_new_tokens=1)).expected
    assert 0 < torn < once < often < 1


def test_open_guesses_are_not_evidence() -> None:
    assert drafted([1, 2, 3, 4, 3, 4], committed=2).done
    assert drafted([1, 2, 9, 1, 2], committed=5, max_new_tokens=1).tokens == (9,)
    assert drafted([1, 2, 3, 4, 1, 2, 3], committed=5, max_new_tokens=2).tokens == (2, 3, 4, 1), (
        "a chain goes on behind them"
    )


def test_under_block_and_rejection_a_guess_is_certain_of_itself() -> None:
    draft = drafted([1, 2, 3, 1, 2], max_new_tokens=2, verification=Verification.BLOCK)
    assert draft.draft_probs == (Distribution((3,), (WHOLE,)), Distribution((1,), (WHOLE,)))


def test_what_ended_sessions_said_is_remembered_for_their_salt_alone() -> None:
    drafter = SuffixDrafter(1000, 4.0, 0.05)
    for session, salt in (("a", "mine"), ("b", "")):
        start = 10 if salt else 20
        drafter.draft([ask_for([start, *range(start, start + 5)], session=session, cache_salt=salt)])
        drafter.forget(session)

    def guess(salt: str, *tokens: int) -> tuple[int, ...]:
        return drafter.draft([ask_for(list(tokens), session=f"new {salt}{tokens}", cache_salt=salt)])[0].tokens

    assert guess("mine", 40, 11, 12) == (13, 14)
    assert guess("", 40, 11, 12) == ()
    assert guess("", 40, 21, 22) == (23, 24)
    assert guess("other", 40, 21, 22) == ()
    assert guess("mine", 40, 13, 14) == (), "nothing follows the end of a text"


def test_prompts_are_not_remembered_and_sharing_can_be_off() -> None:
    for shared, expected in ((1000, (6,)), (0, ())):
        drafter = SuffixDrafter(shared, 4.0, 0.05)
        drafter.draft([ask_for([1, 2, 3, 4, 5, 6], prompt_length=4)])
        drafter.forget("s")
        assert drafter.draft([ask_for([9, 2, 3])])[0].tokens == ()
        assert drafter.draft([ask_for([9, 7, 5], session="t")])[0].tokens == expected


def test_what_a_session_said_itself_weighs_more() -> None:
    drafter = SuffixDrafter(1000, 4.0, 0.05)
    drafter.draft([ask_for([0, 1, 2, 30], session="a")])
    drafter.forget("a")
    assert drafter.draft([ask_for([1, 2, 40, 9, 1, 2], max_new_tokens=1)])[0].tokens == (40,)
    assert drafter.draft([ask_for([8, 1, 2], max_new_tokens=1, session="t")])[0].tokens == (30,)


def test_memory_is_bounded() -> None:
    drafter = SuffixDrafter(200, 4.0, 0.05)
    for number in range(40):
        session = f"s{number}"
        drafter.draft([ask_for([number, *words(90, number)], session=session, cache_salt=str(number % 20))])
        drafter.forget(session)
        drafter.draft([ask_for([1], session=session, cache_salt=str(number % 20))])
    assert len(drafter._shared_texts) <= 16
    for memory in drafter._shared_texts.values():
        assert sum(automaton.size for automaton in memory.generations) <= 200
        assert len(memory._waiting) <= 200
    assert not set(drafter._texts) - {f"s{number}" for number in range(40)}
    for number in range(40):
        drafter.forget(f"s{number}")
    assert not drafter._texts
    drafter.forget("never seen")


def test_a_long_prompt_is_taken_in_piece_by_piece() -> None:
    drafter = SuffixDrafter(0, 4.0, 0.05)
    tokens = [*range(40)] * 60
    request = ask_for(tokens, max_new_tokens=3)
    drafts = [drafter.draft([request])[0] for _ in range(3)]
    assert drafts[:2] == [request.chain()] * 2, "it wants to be asked again"
    assert drafts[2].tokens == (0, 1, 2)


# --- trees -----------------------------------------------------------------------------------------------------------

TORN = [1, 2, 3, 5, 9, 1, 2, 4, 6, 8, 1, 2, 3, 5, 7, 1, 2]


def test_runners_up_become_siblings() -> None:
    draft = drafted(TORN, max_new_tokens=2, branches=2, budget=4, depth=2)
    assert draft.parents.count(-1) == 2
    paths = {tuple(path(draft, i)) for i in range(len(draft.tokens))}
    assert paths == {(3,), (4,), (3, 5), (4, 6)}
    assert draft.tokens[0] == 3, "the likeliest comes first"
    assert draft.done


def test_a_tree_keeps_to_its_limits() -> None:
    assert len(drafted(TORN, branches=2, budget=3, depth=2).tokens) == 3
    assert drafted(TORN, branches=1, budget=9, depth=9).parents == ()
    deepest = drafted(TORN, branches=2, budget=30, depth=3)
    assert max(len(path(deepest, i)) for i in range(len(deepest.tokens))) == 3


def test_a_tree_grows_from_what_is_open() -> None:
    request = ask_for([*TORN, 3], committed=len(TORN), max_new_tokens=1, branches=2, budget=2, depth=2)
    draft = SuffixDrafter(0, 4.0, 0.05).draft([request])[0]
    assert dict(zip(draft.tokens, draft.parents, strict=True)) == {3: -1, 5: 0, 4: -1}


def path(draft: Guess, node: int) -> list[int]:
    found: list[int] = []
    while node >= 0:
        found.append(draft.tokens[node])
        node = draft.shape.parents[node]
    return found[::-1]


if __name__ == "__main__":  # how fast it is here: run this file
    for name, text in TEXT_KINDS.items():
        started = time.perf_counter()
        made = automaton(text)
        grown = (time.perf_counter() - started) / len(text) * 1e6
        drafter = SuffixDrafter(65_536, 2.0, 0.1)
        drafter.draft([ask_for(text[:4000], session="other", max_new_tokens=8)])
        drafter.forget("other")
        requests = [ask_for(text[:n], max_new_tokens=8) for n in range(2000, 4000)]
        while not drafter.draft(requests[:1])[0].done and drafter._shared_texts[""]._waiting:
            pass
        started = time.perf_counter()
        for request in requests:
            drafter.draft([request])
        guess = (time.perf_counter() - started) / len(requests) * 1e6
        print(f"{name:10} {grown:6.1f} us a token taken in, {guess:6.1f} us a guess with its commit")
