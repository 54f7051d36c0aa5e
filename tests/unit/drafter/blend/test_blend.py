"""Several drafters as one: who drafts when, how each is judged, and that nothing is lost between them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from drafter.blend.accuracy import AccuracyTracker, Record
from drafter.blend.blend import BlendDrafter
from drafter.hidden_states.earlier_states import MAX_AWAITING
from drafter.interface import DraftRequest
from drafter.methods.ngram import NgramDrafter
from drafter.methods.registry import make
from drafter.methods.suffix import SuffixDrafter
from drafter.session import DraftOpening, DraftSession
from outrider.hidden_states.projection import PackedProjection
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.earlier_states import MAX_EARLIER_POSITIONS
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution, DraftSteering, Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.speculation.tree import GuessTree

VOCAB = 100
_DRAW = random.Random(5)
NOVEL = [_DRAW.randrange(VOCAB) for _ in range(400)]
LOOP = [*range(20, 60)] * 10
PROMPT = 3
SPOKEN = Vocabulary(("a", "b"))


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Model:
    """Knows what is true, except where it is wrong; takes its time."""

    truth: Sequence[int]
    clock: Clock
    cost_s: float = 0.005
    wrong: Callable[[int], bool] = lambda position: False
    needs_hidden_states: bool = False
    vocabulary: Vocabulary | None = SPOKEN
    limit: int = 10**9
    target_digest: str = ""
    requests: list[DraftRequest] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            "fake",
            "fake-model",
            vocab_size=VOCAB,
            vocabulary_digest="d",
            context_length=self.limit,
            target_digest=self.target_digest,
        )

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        self.requests += requests
        self.clock.now += self.cost_s
        return [self._draft(request) for request in requests]

    def forget(self, session: str) -> None:
        self.forgotten.append(session)

    def _draft(self, request: DraftRequest) -> Guess:
        position = len(request.tokens)
        if position >= self.limit:
            return request.chain(done=True)
        token = (self.truth[position] + self.wrong(position)) % VOCAB
        if request.params.mode.needs_draft_probs:
            ids = sorted({token, (token + 1) % VOCAB})
            return request.chain([token], [Distribution(tuple(ids), (WHOLE - 1, 1))])
        if request.branches == 1:
            return request.chain([token])
        rest = (token, (token + 1) % VOCAB)[: request.budget]
        return grown(request, rest, (request.open_guess.tip,) * len(rest))


def grown(request: DraftRequest, tokens: Sequence[int], parents: Sequence[int]) -> Guess:
    known = request.open_guess
    parents = (*known.shape.parents, *parents)
    return Guess(request.committed, 0, 0, (*known.tokens, *tokens), parents=parents)


@dataclass
class Run:
    rounds: int
    guesses: list[Guess]
    session: DraftSession


def run(
    drafter: BlendDrafter, truth: Sequence[int], clock: Clock, length: int = 200, *, gamma: int = 4, branches: int = 1,
    verify_s: float = 0.02, **params,
) -> Run:  # fmt: skip
    """Draft, verify, commit, one after the other."""
    params = {"temperature": 0.0} | params
    drafter.forget("s")
    session = DraftSession(
        DraftOpening(
            "s",
            0,
            tuple(truth[:PROMPT]),
            PROMPT,
            SamplingParams(seed=1, max_tokens=10_000, **params),
            VOCAB,
            DraftSteering(gamma=gamma, branches=branches),
        )
    )
    session.key = "s"
    committed = list(truth[:PROMPT])
    single = session.params.mode.needs_draft_probs
    tree = GuessTree(committed, single=single, max_nodes=256, max_ahead=64)
    rounds, guesses = 0, []
    while len(committed) < length:
        for _ in range(200):
            if (request := session.next_request()) is None:
                break
            session.add_guess(drafter.draft([request])[0], 1)
        else:
            raise AssertionError("asked again and again")
        while (guess := session.next_message()) is not None:
            guesses.append(guess)
            tree.add(guess)
        block = tree.block(256, 64)
        paths = block.paths
        at = len(committed)
        held = max(len(path) for path in paths if list(path) == list(truth[at : at + len(path)]))
        new = tuple(truth[at : at + held + 1])
        committed.extend(new)
        tree.commit(new)
        session.commit(at, new)
        clock.now += verify_s
        rounds += 1
    return Run(rounds, guesses, session)


def blend(truth: Sequence[int], **more) -> tuple[BlendDrafter, Model, Clock]:
    clock = Clock()
    model = Model(truth, clock, **more)
    return BlendDrafter({"suffix": SuffixDrafter(0, 4.0, 0.1), "model": model}, clock), model, clock


# --- who drafts ------------------------------------------------------------------------------------------------------


def test_what_repeats_itself_is_copied_and_the_model_rests() -> None:
    drafter, model, clock = blend(LOOP)
    run(drafter, LOOP, clock, 60)
    before = len(model.requests)
    ended = run(drafter, LOOP, clock, 300)
    assert len(model.requests) - before < 60, "only the first time round"
    assert ended.rounds < 300 / 5 + 10


def test_what_is_new_is_drafted_by_the_model() -> None:
    drafter, model, clock = blend(NOVEL)
    ended = run(drafter, NOVEL, clock, 200)
    assert len(model.requests) > 120
    assert ended.rounds < 200 / 5 + 8, "chance matches of the suffix drafter have not spoilt it"


def test_a_model_that_is_always_wrong_or_too_slow_is_not_waited_for() -> None:
    for more in ({"wrong": lambda position: True}, {"cost_s": 1.0}):
        drafter, model, clock = blend(LOOP, **more)
        run(drafter, LOOP, clock, 300)
        late = [request for request in model.requests if request.committed > 150]
        assert len(late) < 15, more


def test_promises_that_are_not_kept_are_believed_less() -> None:
    """The text repeats its words, but never goes on as it did."""
    draw = random.Random(3)
    truth = [token for _ in range(200) for token in (1, 2, draw.randrange(10, VOCAB))]
    drafter, model, clock = blend(truth)
    ended = run(drafter, truth, clock, 400, gamma=6)
    kept = drafter._records["suffix"].accepted_share[2]
    assert kept.total < 0.6 * kept.weight
    assert drafter._records["suffix"].expected_accepted(3.0, Record()) < 2
    assert ended.rounds < 400 / 7 + 40
    assert model.requests


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("right_from", "rounds", "late"), [(600, (0, 600), (600, 800)), (5000, (770, 790), (0, 40))])
def test_a_model_that_was_wrong_in_an_old_part_of_a_text_is_tried_again(
    right_from: int, rounds: tuple[int, int], late: tuple[int, int], seed: int
) -> None:
    """A poor copy was always at hand, so the model never drafted again. One that stays wrong is hardly ever asked."""
    draw = random.Random(seed)
    truth = [token for _ in range(700) for token in (1, 2, draw.randrange(10, VOCAB))]
    drafter, model, clock = blend(truth, cost_s=0.002, wrong=lambda position: position < right_from)
    ended = run(drafter, truth, clock, 2080, gamma=6)
    assert rounds[0] < ended.rounds < rounds[1]
    assert late[0] < sum(request.committed > 1000 for request in model.requests) < late[1]


def test_a_chain_may_mix_members() -> None:
    """What is copied is too short but sure: the model goes on behind it."""
    drafter, model, _ = blend([])
    phrase = [1, 2, 3, 4, 5, 6, 7, 8]
    text = [*phrase, 50, *phrase, 51, *phrase, 52, *phrase]
    model.truth = [*text, 53, 54, 55, 56, 57, 58]
    request = DraftRequest("s", text[:-3], len(text) - 3, 1, 6, SamplingParams(temperature=0.0), VOCAB)
    drafter._members["suffix"]._certainty = 0.5  # the phrase is followed by something else each time
    first = drafter.draft([request])[0]
    assert (first.tokens, first.done) == ((6, 7, 8), False)
    assert not model.requests
    again = replace(request, tokens=text, max_new_tokens=3, open_guess=first)
    assert drafter.draft([again])[0].tokens == (6, 7, 8, 53)


def test_a_short_copy_is_sent_alone_where_the_model_is_slow() -> None:
    drafter, _, clock = blend(LOOP, cost_s=10.0)
    drafter._seconds["model"].add(10.0)
    run(drafter, LOOP, clock, 20, gamma=1)
    text = [*LOOP[:45]]
    request = DraftRequest("t", text, len(text), 1, 60, SamplingParams(temperature=0.0), VOCAB)
    draft = drafter.draft([request])[0]
    assert draft.tokens
    assert draft.done


def test_without_a_model_the_best_proposal_is_taken() -> None:
    drafter = BlendDrafter({"ngram": NgramDrafter(2, 4), "suffix": SuffixDrafter(0, 4.0, 0.1)})
    text = [1, 2, 3, 40, 9, 1, 2, 3, 41, 9, 8, 7, 1, 2, 3, 41, 9, 1, 2, 3]
    draft = drafter.draft([DraftRequest("s", text, len(text), 1, 3, SamplingParams(temperature=0.0), VOCAB)])[0]
    assert draft.tokens[:1] == (41,)
    nothing = drafter.draft([DraftRequest("t", [1, 2], 2, 1, 3, SamplingParams(temperature=0.0), VOCAB)])[0]
    assert (nothing.tokens, nothing.done) == ((), True)
    assert drafter.vocabulary is None


def test_when_the_model_has_nothing_the_proposal_is_used() -> None:
    drafter, model, _ = blend(NOVEL, limit=2)
    text = [1, 2, 3, 9, 1, 2]
    drafter._records["suffix"].record_outcome(0.6, 0)
    draft = drafter.draft([DraftRequest("s", text, len(text), 1, 1, SamplingParams(temperature=0.0), VOCAB)])[0]
    assert (draft.tokens, draft.done) == ((3,), True)
    assert model.requests, "it was asked first"


def test_of_two_models_the_better_one_drafts() -> None:
    clock = Clock()
    good = Model(NOVEL, clock)
    bad = Model(NOVEL, clock, wrong=lambda position: position % 2 == 0)
    drafter = BlendDrafter({"bad": bad, "good": good}, clock)
    run(drafter, NOVEL, clock, 300)
    assert bad.requests
    assert sum(request.committed > 150 for request in good.requests) > 10 * sum(
        request.committed > 150 for request in bad.requests
    )


@dataclass
class ReadingModel(Model):
    """Takes longer for the first draft of a session, as it reads the prompt."""

    read_s: float = 0.0
    known: set[str] = field(default_factory=set)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        sessions = {request.session for request in requests}
        self.clock.now += self.read_s * len(sessions - self.known)
        self.known |= sessions
        return super().draft(requests)


def test_a_model_is_not_judged_by_the_time_in_which_it_reads_a_prompt() -> None:
    """The better model, which reads longer, drafted once and never again."""
    clock = Clock()
    good = ReadingModel(NOVEL, clock, read_s=0.2)
    bad = ReadingModel(NOVEL, clock, wrong=lambda position: position % 2 == 0, read_s=0.1)
    run(BlendDrafter({"good": good, "bad": bad}, clock), NOVEL, clock, 300)
    assert len(good.requests) > 10 * len(bad.requests)


@pytest.mark.parametrize("call", range(2, 10))
def test_a_model_that_stalls_in_one_of_its_first_drafts_drafts_on(call: int) -> None:
    """As where a kernel is compiled in the first step of decoding."""
    clock = Clock()
    good, bad = Model(NOVEL, clock), Model(NOVEL, clock, wrong=lambda position: position % 2 == 0)
    costs = [0.005] * (call - 1) + [2.0]
    draft = good.draft

    def stalling(requests: Sequence[DraftRequest]) -> list[Guess]:
        good.cost_s = costs.pop(0) if costs else 0.005
        return draft(requests)

    good.draft = stalling  # type: ignore[method-assign]
    run(BlendDrafter({"good": good, "bad": bad}, clock), NOVEL, clock, 300)
    assert len(good.requests) > 10 * len(bad.requests)


def test_a_model_that_stalls_once_drafts_on() -> None:
    """A paused process or other load took seconds; the worse model drafted for ever then, and the better one rested."""
    clock = Clock()
    good, bad = Model(NOVEL, clock), Model(NOVEL, clock, wrong=lambda position: position % 2 == 0)
    drafter = BlendDrafter({"bad": bad, "good": good}, clock)
    run(drafter, NOVEL, clock, 200)
    good.cost_s = 60.0
    drafter.draft([DraftRequest("x", tuple(NOVEL[:50]), 50, PROMPT, 1, SamplingParams(temperature=0.0), VOCAB)])
    good.cost_s = 0.005
    good.requests.clear()
    bad.requests.clear()
    run(drafter, NOVEL, clock, 300)
    assert len(good.requests) > 10 * len(bad.requests)


def test_a_model_that_has_nothing_to_say_gives_way_to_the_next() -> None:
    """As one that waits for hidden states that never come."""
    clock = Clock()
    mute, other = Model(NOVEL, clock, limit=0, vocabulary=None), Model(NOVEL, clock)
    drafter = BlendDrafter({"mute": mute, "other": other, "suffix": SuffixDrafter(0, 4.0, 0.1)}, clock)
    ended = run(drafter, NOVEL, clock, 150)
    assert mute.requests
    assert ended.rounds < 150 / 5 + 5


# --- trees -----------------------------------------------------------------------------------------------------------


def test_a_proposal_joins_the_models_tree_as_a_branch() -> None:
    drafter, model, _ = blend(range(60, 100))
    text = [1, 2, 3, 4, 5, 9, 1, 2]
    params = SamplingParams(temperature=0.0)
    drafter._rest_s = 0.05
    for _ in range(20):
        drafter._records["suffix"].record_outcome(1.5, 0)
        drafter._records["suffix"].record_outcome(0.8, 0)
    first = DraftRequest("s", text, len(text), 1, 2, params, VOCAB, branches=3, budget=6, depth=2)
    draft = drafter.draft([first])[0]
    assert (len(draft.tokens), draft.done) == (2, False), "the model's first level"
    assert (model.requests[0].branches, model.requests[0].budget) == (2, 4), "room is kept for the branch"
    more = DraftRequest(
        "s",
        [*text, draft.tokens[0]],
        len(text),
        1,
        1,
        params,
        VOCAB,
        open_guess=draft,
        branches=3,
        budget=4,
        depth=2,
    )
    last = drafter.draft([more])[0]
    assert last.done
    assert last.parents[2:] == (0, 0, -1, 4), "the model's second level, then the copy from the root"
    assert last.tokens[4:] == (3, 4)


@pytest.mark.parametrize("truth", [LOOP, NOVEL], ids=["loop", "novel"])
@pytest.mark.parametrize("branches", [2, 3, 5])
def test_trees_keep_to_what_may_be_open(truth: list[int], branches: int) -> None:
    drafter, model, clock = blend(truth, wrong=lambda position: position % 5 == 0)
    ended = run(drafter, truth, clock, 250, branches=branches)
    assert ended.rounds < 120
    for request in model.requests:
        assert request.budget >= 1
        assert request.max_new_tokens >= 1


# --- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truth", [LOOP, NOVEL], ids=["loop", "novel"])
def test_every_drawn_token_is_sent_with_what_it_was_drawn_from(truth: list[int]) -> None:
    drafter, model, clock = blend(truth, wrong=lambda position: position % 7 == 0)
    drawn: dict[tuple[int, int], tuple[int, Distribution]] = {}
    draft_one = model._draft

    def remembering(request: DraftRequest) -> Guess:
        draft = draft_one(request)
        drawn[request.committed, len(request.tokens)] = (draft.tokens[-1], draft.draft_probs[-1])
        return draft

    model._draft = remembering
    ended = run(drafter, truth, clock, 200, temperature=1.0, verification=Verification.BLOCK)
    sent = {
        (token, prob): guess.position + i
        for guess in ended.guesses
        for i, (token, prob) in enumerate(zip(guess.tokens, guess.draft_probs, strict=True))
    }
    assert drawn
    for (_, position), (token, prob) in drawn.items():
        assert (token, prob) in sent, f"drawn for {position} and not sent"
    kinds = {len(prob.ids) for _, prob in sent}
    assert kinds == ({1, 2} if truth is LOOP else kinds | {2}), "point masses of the copy, and the model's own"


# --- judging ---------------------------------------------------------------------------------------------------------


def ask_at(tokens: Sequence[int], committed: int | None = None, **more) -> DraftRequest:
    committed = len(tokens) if committed is None else committed
    more = {"open_guess": Guess(committed, 0, 0, tuple(tokens[committed:]))} | more
    return DraftRequest("s", list(tokens), committed, 1, 4, SamplingParams(temperature=0.0), VOCAB, **more)


def promised(request: DraftRequest, tokens: Sequence[int], expected: float) -> Guess:
    return replace(request.chain(tokens), expected=expected)


def heard(judge: AccuracyTracker, tokens: Sequence[int]) -> Record:
    record = {"m": Record()}
    judge.update(ask_at(tokens), [record])
    return record["m"]


def test_a_promise_is_judged_when_its_fate_is_known() -> None:
    judge = AccuracyTracker(2)
    judge.record_chain("m", ask_at([1, 2]), promised(ask_at([1, 2]), (3, 4, 5), 2.5))
    assert heard(judge, [1, 2, 3, 4]).accepted_share[2].weight == 0, "5 may still come"
    record = heard(judge, [1, 2, 3, 4, 9])
    assert (record.accepted_share[2].total, record.accepted_share[2].weight) == (2.0, 2.5)
    assert heard(judge, [1, 2, 3, 4, 9, 9]).accepted_share[2].weight == 0, "once"


def test_a_promise_behind_guesses_that_failed_is_dropped() -> None:
    judge = AccuracyTracker(2)
    judge.record_chain("m", ask_at([1, 2, 7], 2), promised(ask_at([1, 2, 7], 2), (3,), 0.5))
    assert heard(judge, [1, 2, 8, 3]).accepted_share[0].weight == 0
    assert not judge._chains


def test_tokens_are_hits_if_those_before_them_came_true() -> None:
    judge = AccuracyTracker(2)
    judge.record_tokens("m", ask_at([1, 2]), ask_at([1, 2]).chain((3, 4, 5)))
    assert heard(judge, [1, 2, 3]).hits.total == 1
    record = heard(judge, [1, 2, 3, 8, 5])
    assert (record.hits.total, record.hits.weight) == (0, 1), "5 was guessed behind 4"
    assert not judge._tokens_by_position


def test_any_sibling_is_a_hit() -> None:
    judge = AccuracyTracker(2)
    request = ask_at([1, 2, 7], 2, branches=2)
    judge.record_tokens("m", request, grown(request, (8, 9, 6), (-1, 0, 1)))
    record = heard(judge, [1, 2, 8, 6])
    assert record.hits.total == pytest.approx(2, abs=0.2)
    judge = AccuracyTracker(2)
    judge.record_tokens("m", request, grown(request, (8, 9), (-1, 0)))
    assert heard(judge, [1, 2, 7, 6]).hits.total < heard(AccuracyTracker(2), [1, 2]).hits.total + 0.1


def test_pending_promises_are_bounded() -> None:
    judge = AccuracyTracker(1)
    for n in range(1, 1000):
        request = ask_at([0] * n, 1)
        judge.record_chain("m", request, promised(request, (1,), 1.0))
    assert len(judge._chains) <= 128


# --- features, names, ends -------------------------------------------------------------------------------------------


def rows(position: int, count: int = 1) -> HiddenStates:
    return HiddenStates(position, 4, bytes(2 * 4 * count))


def test_a_member_gets_every_hidden_state_with_its_next_ask() -> None:
    drafter, model, clock = blend(LOOP, needs_hidden_states=True)
    assert drafter.needs_hidden_states
    run(drafter, LOOP, clock, 130)
    seen = len(model.requests)
    text = LOOP[:130]
    copied = DraftRequest("x", text, len(text), 1, 4, SamplingParams(temperature=0.0), VOCAB, hidden_states=(rows(1),))
    drafter.draft([copied])
    assert len(model.requests) == seen, "this one was copied"
    novel = DraftRequest(
        "x", [*text, 99], len(text) + 1, 1, 4, SamplingParams(temperature=0.0), VOCAB, hidden_states=(rows(2),)
    )
    drafter.draft([novel])
    assert model.requests[-1].hidden_states == (rows(1), rows(2))
    model.truth = [*text, 99, *range(200)]
    drafter.draft([DraftRequest("x", [*text, 99, 1], len(text) + 1, 1, 3, novel.params, VOCAB)])
    assert model.requests[-1].hidden_states == (), "once"


def test_hidden_states_that_nobody_fetches_are_dropped() -> None:
    drafter, _, _ = blend(LOOP, needs_hidden_states=True)
    for n in range(100):
        text = LOOP[: 130 + n]
        params = SamplingParams(temperature=0.0)
        drafter.draft([DraftRequest("x", text, len(text), 1, 4, params, VOCAB, hidden_states=(rows(n, 400),))])
    kept = drafter._sessions["x"].pending_states["model"]
    most = MAX_EARLIER_POSITIONS + MAX_AWAITING
    assert most - 400 < kept._positions <= most, "as much as a member alone would get"
    assert kept.take()[-1] == rows(99, 400)


def test_it_is_named_after_its_members() -> None:
    drafter, model, _ = blend(NOVEL)
    info = drafter.info
    assert (info.name, info.vocab_size, info.vocabulary_digest) == ("suffix+model", VOCAB, "d")
    other = BlendDrafter({"suffix": SuffixDrafter(0, 3.0, 0.1), "model": model})
    assert len({info.fingerprint, other.info.fingerprint, model.info.fingerprint}) == 3
    assert drafter.vocabulary == model.vocabulary


def test_all_members_forget() -> None:
    drafter, model, clock = blend(LOOP)
    key = run(drafter, LOOP, clock, 50).session.key
    drafter.forget(key)
    assert model.forgotten[-1] == key
    assert not drafter._sessions
    assert not drafter._members["suffix"]._texts
    drafter.forget("never seen")


@pytest.mark.parametrize(
    ("kind", "named"),
    [("suffix+nonsense", "nonsense"), ("suffix+", r"kind is suffix\+"), ("ngram+ngram", "twice"), ("", "kind is ,")],
)
def test_members_that_cannot_be_are_refused(kind: str, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        make(DrafterSettings(kind=kind), lambda _: None)


def test_a_kind_with_a_plus_is_a_blend() -> None:
    drafter = make(DrafterSettings(kind="suffix+ngram"), lambda _: None)
    assert drafter.info.name == "suffix+ngram"


def test_the_target_that_a_member_was_made_for_is_told() -> None:
    """Such a member takes any vocabulary, and is a model all the same."""
    clock = Clock()
    trained = Model([], clock, vocabulary=None, target_digest="target")
    blended = BlendDrafter({"suffix": SuffixDrafter(0, 4.0, 0.1), "trained": trained, "model": Model([], clock)}, clock)
    assert (blended.info.target_digest, blended.info.vocabulary_digest) == ("target", "d")
    assert blended.vocabulary == SPOKEN
    assert list(blended._proposers) == ["suffix"]
    with pytest.raises(StartupError, match="targets"):
        BlendDrafter({"a": trained, "b": Model([], clock, vocabulary=None, target_digest="another")}, clock)


def test_models_of_different_vocabularies_are_refused() -> None:
    clock = Clock()
    with pytest.raises(StartupError, match="vocabular"):
        BlendDrafter({"a": Model([], clock), "b": Model([], clock, vocabulary=Vocabulary(("x",)))}, clock)


class LayerModel(Model):
    """Reads states of several layers."""

    projection = PackedProjection({"fc.weight": torch.ones(2, 4)}, 1e-5, (1, 2))


def test_the_projection_is_that_of_the_member_that_has_one() -> None:
    clock = Clock()
    reads_layers = LayerModel([], clock, needs_hidden_states=True)
    reads_final = Model([], clock, needs_hidden_states=True)
    joined = BlendDrafter({"suffix": SuffixDrafter(0, 4.0, 0.1), "a": reads_layers}, clock)
    assert joined.projection is reads_layers.projection
    assert BlendDrafter({"suffix": SuffixDrafter(0, 4.0, 0.1), "a": reads_final}, clock).projection is None
    with pytest.raises(StartupError, match="a and b have different hidden states"):
        BlendDrafter({"a": reads_layers, "b": reads_final}, clock)


if __name__ == "__main__":  # what the bookkeeping costs here: run this file
    for name, truth in (("loop", LOOP), ("novel", NOVEL)):
        clock = Clock()
        alone = SuffixDrafter(0, 4.0, 0.1)
        spent = {}
        for drafter in (BlendDrafter({"suffix": alone, "model": Model(truth, clock)}, clock), alone):
            started = time.perf_counter()
            run(drafter, truth, clock, 380)
            spent[type(drafter).__name__] = time.perf_counter() - started
        print(name, {kind: f"{s / 380 * 1e6:.0f} us a token" for kind, s in spent.items()})
