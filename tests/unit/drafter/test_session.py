"""The drafter's session: a tree that is kept as far as commits agree with it. And prompt lookup."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.interface import DraftRequest
from drafter.methods.ngram import _INDEXED_PER_REQUEST, NgramDrafter
from drafter.session import MAX_TREE, MESSAGE_S, DraftOpening, DraftSession
from outrider.base.aio import background
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution, DraftSteering, Guess
from outrider.speculation.tree import GuessTree
from outrider.v1 import drafter_pb2 as pb

PROMPT = (1, 2, 3)
VOCAB = 50


def opened(gamma: int = 4, max_tokens: int = 100, branches: int = 1, **params) -> DraftSession:
    opening = DraftOpening(
        "s",
        0,
        PROMPT,
        len(PROMPT),
        SamplingParams(seed=1, max_tokens=max_tokens, **params),
        VOCAB,
        DraftSteering(gamma=gamma, branches=branches),
    )
    opening.check()
    return DraftSession(opening)


def sent(session: DraftSession) -> list[Guess]:
    guesses = []
    while (guess := session.next_message()) is not None:
        guesses.append(guess)
    return guesses


def answer(
    session: DraftSession, *tokens: int, done: bool = False, parents: tuple[int, ...] = (),
    probs: tuple[Distribution, ...] | None = None,
) -> Guess:  # fmt: skip
    """A drafter's answer to the session's last request: a chain, or a tree with the parents of the new tokens."""
    request = session._request
    assert request is not None
    if not parents:
        return request.chain(tokens, probs, done=done)
    known = request.open_guess
    parents = (*known.shape.parents, *parents)
    return Guess(request.committed, 0, 0, (*known.tokens, *tokens), parents=parents, done=done)


def draft(session: DraftSession, *tokens: int, done: bool = False, parents: tuple[int, ...] = ()) -> list[Guess]:
    session.next_request()
    session.add_guess(answer(session, *tokens, done=done, parents=parents), 100)
    return sent(session)


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_a_new_session_asks_for_gamma_tokens_after_the_prompt() -> None:
    request = opened(gamma=4).next_request()
    assert request is not None
    assert (list(request.tokens), request.committed, request.prompt_length, request.max_new_tokens) == (
        [1, 2, 3],
        3,
        3,
        4,
    )


def test_an_ask_continues_the_open_chain() -> None:
    session = opened(gamma=4)
    draft(session, 7)
    request = session.next_request()
    assert request is not None
    assert (list(request.tokens), request.committed, request.max_new_tokens) == ([1, 2, 3, 7], 3, 3)


def test_nothing_is_asked_at_gamma_zero_or_when_the_chain_is_long_enough() -> None:
    assert opened(gamma=0).next_request() is None
    session = opened(gamma=2)
    draft(session, 7, 8)
    assert session.next_request() is None
    session.steer(DraftSteering(gamma=3))
    assert session.next_request() is not None


@pytest.mark.parametrize(("max_tokens", "max_new_tokens"), [(1, None), (2, 1), (3, 2), (100, 4)])
def test_no_guess_past_what_may_be_committed(max_tokens: int, max_new_tokens: int | None) -> None:
    """The last token of all is always the target's own."""
    request = opened(gamma=4, max_tokens=max_tokens).next_request()
    assert (request.max_new_tokens if request else None) == max_new_tokens


def test_a_drafter_that_is_done_is_asked_again_after_a_commit() -> None:
    session = opened()
    draft(session, done=True)
    assert session.next_request() is None
    session.commit(3, (9,))
    assert session.next_request() is not None


def test_a_drafter_that_is_done_is_asked_again_after_steering() -> None:
    """With other limits it may have more to say."""
    session = opened()
    draft(session, done=True)
    assert session.next_request() is None
    session.steer(DraftSteering(gamma=8))
    assert session.next_request() is not None


def test_open_guesses_are_bounded_whatever_is_asked_for() -> None:
    session = opened(gamma=32, branches=8)
    request = session.next_request()
    assert request is not None
    assert request.budget == MAX_TREE


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_a_chain_is_sent_when_it_reaches_gamma() -> None:
    session = opened(gamma=3)
    assert draft(session, 7) == []
    assert draft(session, 8) == []
    assert draft(session, 9) == [Guess(3, 1, 0, (7, 8, 9), draft_us=300)]


def test_a_chain_is_sent_when_nothing_more_will_come() -> None:
    session = opened(gamma=4)
    assert draft(session, 7, done=True) == [Guess(3, 1, 0, (7,), draft_us=100), Guess(3, 0, 0, ())]


def test_an_eager_session_sends_what_there_is() -> None:
    session = opened(gamma=3)
    session.steer(DraftSteering(eager=True))
    assert draft(session, 7) == [Guess(3, 1, 0, (7,), draft_us=100)]
    assert draft(session, 8) == [Guess(4, 2, 1, (8,), draft_us=100)]


def test_an_eager_session_asks_for_little_at_a_time() -> None:
    """So that a commit takes effect soon: about as many tokens as its drafter makes in four milliseconds."""
    session = opened(gamma=64)
    session.steer(DraftSteering(eager=True))
    for _ in range(20):
        request = session.next_request()
        assert request is not None
        session.add_guess(request.chain((7,) * request.max_new_tokens), 2_000 * request.max_new_tokens)
        session.commit(request.committed, (9,))
    assert request.max_new_tokens == 2


def test_nothing_to_guess_is_said_once_per_position() -> None:
    session = opened()
    assert draft(session, done=True) == [Guess(3, 0, 0, (), draft_us=100)]
    session.steer(DraftSteering(gamma=5))
    assert draft(session, done=True) == []
    session.commit(3, (9,))
    assert [guess.position for guess in draft(session, done=True)] == [4]


def test_an_agreeing_commit_keeps_the_chain_and_the_next_guess_hangs_from_it() -> None:
    session = opened(gamma=3)
    draft(session, 7, 8, 9)
    session.commit(3, (7, 8))
    request = session.next_request()
    assert request is not None
    assert (list(request.tokens), request.committed, request.max_new_tokens) == ([1, 2, 3, 7, 8, 9], 5, 2)
    assert draft(session, 4, 5) == [Guess(6, 4, 3, (4, 5), draft_us=100)]


def test_a_disagreeing_commit_drops_the_chain() -> None:
    session = opened(gamma=3)
    draft(session, 7, 8, 9)
    session.commit(3, (7, 5))
    request = session.next_request()
    assert request is not None
    assert (list(request.tokens), request.max_new_tokens) == ([1, 2, 3, 7, 5], 3)
    assert draft(session, 1, 2, 3) == [Guess(5, 4, 0, (1, 2, 3), draft_us=100)], "from the committed prefix again"


@pytest.mark.parametrize(("token", "kept"), [(9, (4,)), (8, ())])
def test_what_was_drafted_while_a_bonus_came_follows_another_path_unless_it_was_right(
    token: int, kept: tuple[int, ...]
) -> None:
    session = opened(gamma=4)
    draft(session, 7, 8)
    session.next_request()
    session.commit(3, (7, 8, 9))
    session.add_guess(answer(session, token, 4, done=True), 10)
    request = session.next_request()
    assert request is not None
    assert list(request.tokens[request.committed :]) == list(kept)


def test_a_tree_is_sent_as_one_guess_and_asked_for_as_a_whole() -> None:
    session = opened(gamma=2, branches=2)
    (guess,) = draft(session, 7, 8, 9, 4, parents=(-1, -1, 0, 0))
    assert (guess.tokens, guess.parents, guess.parent) == ((7, 8, 9, 4), (-1, -1, 0, 0), 0)
    session.steer(DraftSteering(gamma=3))
    request = session.next_request()
    assert request is not None
    assert (request.open_guess.tokens, request.open_guess.parents, request.budget) == ((7, 8, 9, 4), (-1, -1, 0, 0), 2)
    assert list(request.tokens) == [1, 2, 3, 7, 9]
    session.add_guess(answer(session, 5, 6, parents=(2, 3)), 0)
    assert [(g.parent, g.tokens) for g in sent(session)] == [(3, (5,)), (4, (6,))]


def test_a_commit_prunes_the_tree_to_the_branch_that_came_true() -> None:
    session = opened(gamma=2, branches=2)
    draft(session, 7, 8, 9, 4, parents=(-1, -1, 0, 1))
    session.commit(3, (8,))
    request = session.next_request()
    assert request is not None
    assert (request.open_guess.tokens, list(request.tokens)) == ((4,), [1, 2, 3, 8, 4])
    (guess,) = draft(session, 5, 6, parents=(0, -1))[:1]
    assert (guess.position, guess.parent, guess.tokens) == (5, 4, (5,))


def test_a_tree_drafted_while_commits_came_keeps_what_fits() -> None:
    session = opened(gamma=3, branches=2)
    session.next_request()
    session.commit(3, (7,))
    session.add_guess(answer(session, 7, 8, 9, 5, 6, done=True, parents=(-1, -1, 0, 1, 2)), 0)
    assert sent(session) == [], "it was done for what was asked, not for what is asked now"
    guess, passed = draft(session, done=True)
    assert (guess.position, guess.tokens) == (4, (9, 6)), "8 and 5 are gone with what they hang from"
    assert (passed.position, passed.tokens) == (4, ()), "it is shorter than the verifier was told to wait for"


def test_an_eager_session_widens_its_tree_until_no_more_may_be_open() -> None:
    session = opened(gamma=2, branches=2)
    session.steer(DraftSteering(eager=True, nodes=5))
    draft(session, 7, 8, 9, 4, parents=(-1, -1, 0, 1))
    request = session.next_request()
    assert request is not None
    assert (request.max_new_tokens, request.budget) == (1, 1)
    draft(session, 6, parents=(0,))
    assert session.next_request() is None


def test_a_drawn_token_has_no_sibling() -> None:
    session = opened(gamma=3, branches=4, verification=Verification.BLOCK)
    request = session.next_request()
    assert request is not None
    assert (request.branches, request.budget) == (1, 3)


def test_an_unsent_chain_that_was_committed_meanwhile_is_sent_without_its_head() -> None:
    session = opened(gamma=3)
    session.next_request()
    session.add_guess(answer(session, 7, 8), 10)
    session.commit(3, (7,))
    assert draft(session, 9, 4) == [Guess(4, 1, 0, (8, 9, 4), draft_us=110)]


def test_commits_that_overlap_are_merged() -> None:
    session = opened(gamma=3)
    draft(session, 7, 8, 9)
    session.commit(3, (7,))
    session.commit(3, (7, 8))
    session.commit(3, (7,))
    request = session.next_request()
    assert request is not None
    assert (request.committed, list(request.tokens)) == (5, [1, 2, 3, 7, 8, 9])


@pytest.mark.parametrize(
    ("position", "tokens", "name"), [(5, (7,), "committed.position"), (3, (VOCAB,), "committed.tokens[0]")]
)
def test_a_commit_that_cannot_be_is_refused(position: int, tokens: tuple[int, ...], name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        opened().commit(position, tokens)
    assert refused.value.field == name


def test_distributions_travel_with_their_tokens() -> None:
    session = opened(gamma=2, verification=Verification.BLOCK)
    probs = (Distribution((7,), (WHOLE,)), Distribution((8, 9), (WHOLE - 1, 1)))
    session.next_request()
    session.add_guess(answer(session, 7, 8, probs=probs), 0)
    (guess,) = sent(session)
    assert guess.draft_probs == probs


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"session_id": ""}, "open.session_id"),
        ({"session_id": "x" * 129}, "open.session_id"),
        ({"vocab_size": 0}, "open.vocab_size"),
        ({"tokens": ()}, "open.tokens"),
        ({"tokens": (1, VOCAB, 2)}, "open.tokens[1]"),
        ({"prompt_length": 0}, "open.prompt_length"),
        ({"prompt_length": 4}, "open.prompt_length"),
        ({"params": SamplingParams()}, "params.seed"),
        ({"params": SamplingParams(seed=1, top_p=0.0)}, "params.top_p"),
        ({"steer": DraftSteering(gamma=65)}, "steer.gamma"),
    ],
)
def test_an_opening_that_cannot_be_is_refused(change: dict, name: str) -> None:
    values = {
        "session_id": "s",
        "epoch": 0,
        "tokens": PROMPT,
        "prompt_length": 3,
        "params": SamplingParams(seed=1),
        "vocab_size": VOCAB,
    }
    with pytest.raises(InvalidRequest) as refused:
        DraftOpening(**(values | change)).check()
    assert refused.value.field == name


def test_an_opening_has_what_its_message_has() -> None:
    params = SamplingParams(seed=1)
    opening = DraftOpening("s", 2, PROMPT, 3, params, VOCAB, DraftSteering(gamma=4), "salt", "digest", (7,), 5, 6)
    sent = {name: getattr(opening, name) for name in pb.OpenDraft.DESCRIPTOR.fields_by_name}
    steer = convert.draft_steering_to_proto(opening.steer)
    message = pb.OpenDraft(**sent | {"params": convert.params_to_proto(params), "steer": steer})
    assert convert.opening_from_proto(DraftOpening, pb.DraftRequest(open=message)) == replace(
        opening, params=replace(params, verification=params.mode)
    )
    with pytest.raises(InvalidRequest, match="first message is steer, must be open"):
        convert.opening_from_proto(DraftOpening, pb.DraftRequest(steer=steer))


# --- drafter and verifier together -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data(), single=st.booleans())
def test_what_a_session_sends_always_fits_into_the_verifiers_tree(data: st.DataObject, single: bool) -> None:
    """Right, wrong, late: no guess is refused, and every one that still fits is in the tree."""
    mode = {"verification": Verification.BLOCK} if single else {}
    session = opened(gamma=data.draw(st.integers(1, 5)), max_tokens=30, branches=data.draw(st.integers(1, 3)), **mode)
    committed = list(PROMPT)
    tree = GuessTree(committed, single=single, max_nodes=64, max_ahead=64)
    token = st.integers(0, 2)
    unsaid: list[tuple[int, tuple[int, ...]]] = []
    underway: list[Guess] = []
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(["draft", "draft", "deliver", "step", "hear", "steer"]))
        if action == "draft" and (request := session.next_request()) is not None:
            assert list(request.tokens[: request.committed]) == committed[: request.committed]
            branching = not single and data.draw(st.booleans())
            tokens = tuple(
                data.draw(st.lists(token, min_size=1, max_size=request.budget if branching else request.max_new_tokens))
            )
            first = len(request.open_guess.tokens)
            places = range(first, first + len(tokens))
            parents = tuple(data.draw(st.integers(-1, place - 1)) for place in places) if branching else ()
            session.add_guess(answer(session, *tokens, done=data.draw(st.booleans()), parents=parents), 5)
            underway += sent(session)
        elif action == "deliver" and underway:
            tree.add(underway.pop(0))
        elif action == "step" and len(committed) < 20:
            block = tree.block(9, 9)
            path = block.paths[data.draw(st.integers(0, len(block.tokens)))]
            new = (*path, data.draw(token))
            unsaid.append((len(committed), new))
            committed.extend(new)
            tree.commit(new)
        elif action == "hear" and unsaid:
            session.commit(*unsaid.pop(0))
        elif action == "steer":
            session.steer(DraftSteering(gamma=data.draw(st.integers(0, 5))))
    for guess in underway:
        tree.add(guess)
    for news in unsaid:
        session.commit(*news)
    # All is said: what the drafter holds open and has sent is what the verifier can check.
    paths = session.open_guesses.guess.paths[1:]
    open_ = {path for path, node_id in zip(paths, session.open_guesses._ids, strict=True) if node_id}
    block = tree.block(99, 99)
    held = {tuple(block.paths[row]) for row in range(1, len(block.tokens) + 1)}
    assert open_ <= held
    if single:
        assert open_ == held


def test_a_target_that_agrees_never_runs_out_of_guesses() -> None:
    """Pipelined: while a step is checked, the next tokens are on their way."""
    session = opened(gamma=4, max_tokens=60)
    committed = list(PROMPT)
    tree = GuessTree(committed, single=False, max_nodes=64, max_ahead=64)
    for _ in range(10):
        while (request := session.next_request()) is not None:
            session.add_guess(request.chain([request.tokens[-1] + 1]), 0)
        for guess in sent(session):
            tree.add(guess)
        block = tree.block(9, 9)
        assert block.tokens == tuple(range(committed[-1] + 1, committed[-1] + 5))
        new = block.tokens[:3]
        committed.extend(new)
        tree.commit(new)
        session.commit(len(committed) - 3, new)


# --- prompt lookup ---------------------------------------------------------------------------------------------------


def ask_for(tokens: list[int], max_new_tokens: int = 4, committed: int | None = None, **params) -> DraftRequest:
    committed = len(tokens) if committed is None else committed
    known = Guess(committed, 0, 0, tuple(tokens[committed:]))
    params = SamplingParams(**params)
    return DraftRequest("s", tokens, committed, 1, max_new_tokens, params, VOCAB, open_guess=known)


def looked_up(tokens: list[int], max_new_tokens: int = 4, shortest: int = 2, longest: int = 4) -> Guess:
    return NgramDrafter(shortest, longest).draft([ask_for(tokens, max_new_tokens)])[0]


def test_what_followed_before_is_guessed_again() -> None:
    assert looked_up([1, 2, 3, 4, 5, 6, 9, 1, 2]).tokens == (3, 4, 5, 6)


def test_the_longest_match_wins() -> None:
    assert looked_up([7, 1, 2, 40, 8, 1, 2, 41, 9, 7, 1, 2], max_new_tokens=1).tokens == (40,)


def test_among_matches_of_one_length_the_latest_wins() -> None:
    assert looked_up([1, 2, 40, 9, 1, 2, 41, 8, 1, 2], max_new_tokens=1).tokens == (41,)


def test_a_loop_is_continued_as_a_loop() -> None:
    assert looked_up([5, 6, 7, 5, 6, 7, 5, 6], max_new_tokens=7).tokens == (7, 5, 6, 7, 5, 6, 7)
    assert looked_up([9, 5, 5, 5], max_new_tokens=5).tokens == (5, 5, 5, 5, 5)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5], [1, 9, 2, 9]])
def test_without_a_match_the_drafter_is_done(tokens: list[int]) -> None:
    guess = looked_up(tokens)
    assert (guess.tokens, guess.done) == ((), True)


def test_a_run_shorter_than_the_shortest_is_no_match() -> None:
    tokens = [1, 9, 2, 3, 9]
    assert looked_up(tokens, shortest=2).done
    assert looked_up(tokens, shortest=1, max_new_tokens=1).tokens == (2,)


def test_no_more_is_guessed_than_there_is_room_for() -> None:
    assert len(looked_up([1, 2, 3, 4, 5, 1, 2], max_new_tokens=2).tokens) == 2


def test_the_index_grows_with_the_session_and_goes_with_it() -> None:
    drafter = NgramDrafter(2, 4)
    assert drafter.draft([ask_for([1, 2, 3])])[0].done
    assert drafter.draft([ask_for([1, 2, 3, 1, 2], max_new_tokens=1)])[0].tokens == (3,)
    drafter.forget("s")
    assert drafter.draft([ask_for([4, 5, 6])])[0].done
    drafter.forget("never seen")


def test_a_long_prompt_is_indexed_in_parts_between_which_other_sessions_are_served() -> None:
    drafter, text = NgramDrafter(2, 4), [*range(40_000), 7, 8]
    guesses = [drafter.propose(ask_for(text, max_new_tokens=2))]
    while not (guesses[-1].tokens or guesses[-1].done):
        guesses.append(drafter.propose(ask_for(text, max_new_tokens=2)))
    assert guesses[-1].tokens == (9, 10)
    assert len(guesses) == len(text) // _INDEXED_PER_REQUEST + 1


def test_open_guesses_are_not_evidence() -> None:
    """Only committed tokens are indexed: a guess must not confirm itself."""
    drafter = NgramDrafter(2, 4)
    assert drafter.draft([ask_for([1, 2, 3, 4, 3, 4], committed=2)])[0].done
    assert drafter.draft([ask_for([1, 2, 9, 1, 2], committed=5, max_new_tokens=1)])[0].tokens == (9,)


def test_under_block_and_rejection_a_lookup_is_certain_of_itself() -> None:
    request = ask_for([1, 2, 3, 1, 2], max_new_tokens=2, verification=Verification.REJECTION)
    assert NgramDrafter(2, 4).draft([request])[0].draft_probs == (
        Distribution((3,), (WHOLE,)),
        Distribution((1,), (WHOLE,)),
    )


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_new_tokens=st.integers(1, 6),
    grow=st.integers(1, 7),
)
def test_lookup_matches_a_search_from_scratch(tokens: list[int], max_new_tokens: int, grow: int) -> None:
    """However the session grew, the answer is that of looking through the whole text."""
    drafter = NgramDrafter(2, 4)
    for end in range(1, len(tokens), grow):
        drafter.draft([ask_for(tokens[:end], max_new_tokens)])
    found = drafter.draft([ask_for(tokens, max_new_tokens)])[0]
    expected: list[int] | None = None
    for size in (4, 3, 2):
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:] and len(tokens) >= size]
        if ends:
            text = list(tokens)
            for i in range(max_new_tokens):
                text.append(text[ends[-1] + i])
            expected = text[len(tokens) :]
            break
    assert (found.tokens, found.done) == (tuple(expected or ()), expected is None)


# --- what waits to be sent -------------------------------------------------------------------------------------------


def eager() -> DraftSession:
    session = opened(gamma=4, branches=2, max_tokens=10_000)
    session.steer(DraftSteering(gamma=4, branches=2, nodes=8, eager=True))
    return session


def test_guesses_that_wait_are_sent_in_one_message() -> None:
    session = eager()
    for tokens, parents in [((7, 8), (-1, -1)), ((9, 5), (0, 1))]:
        session.next_request()
        session.add_guess(answer(session, *tokens, parents=parents), 100)
    assert sent(session) == [Guess(3, 1, 0, (7, 8, 9, 5), draft_us=200, parents=(-1, -1, 0, 1))]


def test_guesses_that_wait_are_pruned_by_a_commit() -> None:
    session = eager()
    session.next_request()
    session.add_guess(answer(session, 7, 8, 9, 5, parents=(-1, -1, 0, 1)), 100)
    session.commit(3, (8,))
    assert [guess.tokens for guess in sent(session)] == [(5,)]
    session.commit(4, (1,))
    assert sent(session) == []


async def test_messages_are_paced() -> None:
    """A coordinator reads 2,000 a second, and there is always a guess to send."""
    session = eager()
    position, count, started = 3, 0, time.monotonic()
    session.next_request()
    session.add_guess(answer(session, 7, parents=(-1,)), 100)
    async for _ in session.messages():
        count += 1
        if count > 10 and time.monotonic() - started > 0.3:
            break
        session.commit(position, (7,))
        position += 1
        session.next_request()
        session.add_guess(answer(session, 7, parents=(-1,)), 100)
    assert count <= (time.monotonic() - started) / MESSAGE_S + 1
    assert MESSAGE_S > 1 / 2000


async def test_a_guess_below_gamma_is_followed_by_an_empty_one_without_another_event() -> None:
    """Else the verifier waits for its whole timeout for guesses that do not come."""
    session = opened(gamma=4)
    session.next_request()
    session.add_guess(answer(session, 7, done=True), 100)
    messages = session.messages()
    found = [await asyncio.wait_for(anext(messages), 10.0) for _ in range(2)]
    assert [guess.tokens for guess in found] == [(7,), ()]
    await messages.aclose()


def test_a_chain_grows_no_deeper_than_the_tree_may_be() -> None:
    """The verifier keeps 64 guesses ahead; what is beyond would be lost, and all that hangs from it."""
    text = (1, 2, 3, 4) * 8
    params = SamplingParams(seed=1, max_tokens=100, temperature=0.0)
    session = DraftSession(DraftOpening("s", 0, text, len(text), params, VOCAB, DraftSteering(8, 3, 0, True)))
    drafter = NgramDrafter(1, 3)
    for _ in range(6):
        if (request := session.next_request()) is None:
            break
        session.add_guess(drafter.propose(request), 100)
        sent(session)
    assert max(session.open_guesses.guess.shape.depths) == 8


def test_texts_of_targets_with_other_vocabularies_stay_apart() -> None:
    """A guess of an id that the target lacks counts as a violation, and the drafter is shunned by all."""
    salts = set()
    for digest in ("one", "another"):
        params = SamplingParams(seed=1)
        opening = DraftOpening("s", 0, PROMPT, 3, params, VOCAB, DraftSteering(gamma=4), "mine", digest)
        request = DraftSession(opening).next_request()
        assert request is not None
        salts.add(request.cache_salt)
    assert len(salts) == 2


def test_nothing_is_sent_after_a_session_has_ended() -> None:
    """It may end in the middle of a drafting step: its span is over, and its verifier's session, too."""
    session, sent = opened(gamma=2), list[Guess]()
    session.send = session.record = sent.append
    session.next_request()
    guess = answer(session, 7, 8)
    session.close()
    session.add_guess(guess, 100)
    assert not sent


@pytest.mark.parametrize("direct", [False, True])
async def test_a_session_whose_open_guesses_are_as_many_as_allowed_says_so_at_each_change(*, direct: bool) -> None:
    """After a change of plan, the tree of the plan before takes all places and is less deep than what is waited for."""
    session, messages = opened(gamma=2, branches=3), asyncio.Queue[Guess]()
    session.send, recorded = messages.put_nowait if direct else None, list[Guess]()
    session.record = recorded.append

    async def read() -> None:
        async for guess in session.messages():
            messages.put_nowait(guess)

    async with background(read()):
        session.next_request()
        session.add_guess(answer(session, 7, 8, 9, 4, 5, 6, parents=(-1, -1, -1, 0, 0, 0)), 100)
        assert len((await asyncio.wait_for(messages.get(), 5.0)).tokens) == 6
        await asyncio.sleep(2 * MESSAGE_S)
        session.steer(DraftSteering(gamma=3, branches=1))
        assert await asyncio.wait_for(messages.get(), 5.0) == Guess(3, 0, 0, ())
        session.commit(3, (7,))
        assert session.next_request() is None
        assert await asyncio.wait_for(messages.get(), 5.0) == Guess(4, 0, 0, ())
    assert [len(guess.tokens) for guess in recorded] == [6, 0, 0]
