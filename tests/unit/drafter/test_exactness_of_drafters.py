"""Invariant 1 where several draft: a blend of members, several drafters on one session's tree, and trees of guesses.

As in test_exactness.py first by exact enumeration, then by seeded chi-square; here whole sessions are played with the
real drafters, tree, noise and judge, only the models are tables. After each part the bugs that its checker sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafter import draft_sampling
from drafter.blend import blend as blending
from drafter.blend.blend import BlendDrafter
from drafter.interface import Drafter, DraftRequest
from drafter.methods.model import ModelDrafter
from drafter.methods.suffix import SuffixDrafter
from drafter.session import DraftOpening, DraftSession
from outrider.engine import SessionTokens, StepResult
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol.cost_curve import UNKNOWN_COST
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import DraftSteering, Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.speculation import acceptance, noise, verification
from outrider.speculation.acceptance import Outcome, RandomSource, SeededNoise
from outrider.speculation.exponential_race import coupled_draws
from outrider.speculation.tree import GuessTree, Node
from outrider.speculation.verification import SessionSampling
from outrider.testing.toy_models import byte_tokenizer
from tests.unit.outrider.speculation.rules import verify
from tests.unit.outrider.speculation.test_exactness import (
    EXACT,
    LOWEST_P,
    SEEN,
    Branches,
    Pair,
    Path,
    by_path,
    chi_square,
    distance,
    every_way,
    noted,
    target_joint,
)

SPOKEN = Vocabulary(("a", "b", "c"))
PROMPT = (0, 1, 2) * 3  # a copy goes on with 0, 1, 2
UNDECIDED = (0, 1, 0, 0, 1, 2, 0)  # one goes on with 1, perhaps
LENGTH = 3
DRAWS = 640
FEW = 320  # plenty for a planted bug
SURELY = 1e-9
PLAIN = DraftSteering(gamma=2)
DRAWN = [Verification.REJECTION, Verification.BLOCK]

Recorder = Callable[[str, object], None]
Late = Callable[[int, int], bool]  # of source and step: whether what is said arrives only after that step


# --- a session of several drafters -----------------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def never(source: int, step: int) -> bool:
    return False


def the_second(source: int, step: int) -> bool:
    return source == 1


def the_first_at_times(source: int, step: int) -> bool:
    return source == 0 and step % 2 == 0


LATE = {"on time": never, "the second late": the_second, "the first late at times": the_first_at_times}


@dataclass(frozen=True)
class Setting:
    """How one session goes; none of it may show in the text."""

    params: SamplingParams
    vocab: int = 3
    prompt: Path = PROMPT
    steering: DraftSteering = PLAIN
    late: Late = never
    rows: int = 9  # guesses that a step takes at most
    tree: type[GuessTree] = GuessTree


# The target's own tokens for a block, from what is committed to the end of the text.
Step = Callable[[Sequence[int], Guess, GuessTree], Sequence[int]]


def play(setting: Setting, drafters: Sequence[Drafter], step: Step) -> Path:
    """The text of one session. Of two guesses for one place the one of the drafter that is named first comes first."""
    committed = list(setting.prompt)
    end = len(committed) + setting.params.max_tokens
    single = setting.params.mode.needs_draft_probs
    tree = setting.tree(committed, single=single, max_nodes=64, max_ahead=64)
    opening = DraftOpening(
        "s", 0, setting.prompt, len(setting.prompt), setting.params, setting.vocab, steer=setting.steering
    )
    sessions = [DraftSession(opening) for _ in drafters]
    steps = 0
    while len(committed) < end:
        underway: list[Guess] = []
        for source, (drafter, session) in enumerate(zip(drafters, sessions, strict=True)):
            for guess in said(drafter, session, source):
                if setting.late(source, steps):
                    underway.append(guess)
                else:
                    tree.add(guess)
        new = tuple(step(committed, tree.block(setting.rows, end - len(committed) - 1), tree))
        at = len(committed)
        committed.extend(new)
        tree.commit(new)
        for guess in underway:
            tree.add(guess)
        for session in sessions:
            session.commit(at, new)
        steps += 1
    for drafter, session in zip(drafters, sessions, strict=True):
        drafter.forget(session.key)
    return tuple(committed[len(setting.prompt) :])


def said(drafter: Drafter, session: DraftSession, source: int) -> list[Guess]:
    while (request := session.next_request()) is not None:
        session.add_guess(drafter.draft([request])[0], 0)
    guesses = []
    while (guess := session.next_message()) is not None:
        guesses.append(replace(guess, source=source))
    return guesses


# --- bugs to plant ---------------------------------------------------------------------------------------------------


class Picky(BlendDrafter):
    """Lets the model draw, and sends the copy instead where the two differ."""

    def _result(self, session: blending._SessionState, drafted: Guess | None) -> Guess:
        new = session.request.new_tokens
        if drafted is not None and session.proposed and new(drafted)[:1] != session.proposed[:1]:
            return session.proposal
        return super()._result(session, drafted)


class Choosy(GuessTree):
    """Of two drafters' tokens for one place it keeps the lower, and not the one that came first."""

    def add(self, guess: Guess) -> int:
        ours = next(iter(self._root.children.values()), None)
        here = guess.position == len(self._committed) and guess.tokens
        if ours is not None and here and guess.tokens[0] < ours.token:
            self._drop(ours)
            self._root.children = {}
        return super().add(guess)


# --- enumeration -----------------------------------------------------------------------------------------------------


@dataclass
class Enumerated:
    """Draws one token per ask from the pair's draft, every way there is."""

    pair: Pair
    branches: Branches
    clock: Clock = field(default_factory=Clock)
    cost_s: float = 0.0
    vocabulary: Vocabulary | None = SPOKEN
    needs_hidden_states: bool = False
    info: ModelInfo = field(default_factory=lambda: ModelInfo("enumerated", "enumerated", vocab_size=3))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        self.clock.now += self.cost_s
        return [self._draft(request) for request in requests]

    def forget(self, session: str) -> None:
        """Nothing is kept."""

    def _draft(self, request: DraftRequest) -> Guess:
        drawn_from = self.pair.draft(tuple(request.tokens[request.prompt_length :]))
        return request.chain([self.branches.token(drawn_from)], [drawn_from])


class Hesitant(Enumerated):
    """Ends its guess where a confidence that looks at the drawn token is low; see `published_blocks._rows`."""

    def _draft(self, request: DraftRequest) -> Guess:
        drafted = super()._draft(request)
        return request.chain(done=True) if request.new_tokens(drafted) == (0,) else drafted


class Luck:
    """Branches as a RandomSource and nothing else."""

    def __init__(self, branches: Branches) -> None:
        self.accept = branches.accept
        self.draw = branches.draw


def checked(
    pair: Pair, setting: Setting, chance: RandomSource, clock: Clock | None = None, verify_s: float = 0.0
) -> Step:
    """A step of the real judge on the pair's target."""

    def step(committed: Sequence[int], block: Guess, tree: GuessTree) -> Sequence[int]:
        if clock is not None:
            clock.now += verify_s
        path = tuple(committed[len(setting.prompt) :])
        rows = [pair.target(path + tuple(block.paths[row])) for row in range(len(block.tokens) + 1)]
        logits = torch.tensor(rows, dtype=torch.float64).log()
        return verify(logits, block, SessionSampling(setting.params, None, chance)).tokens

    return step


def bias(
    pair: Pair, setting: Setting, drafters: Callable[[Branches, Clock], Sequence[Drafter]], verify_s: float = 0.1
) -> float:
    """How far the text of a session is from the target's."""
    joint: dict[Path, float] = {}

    def text(branches: Branches) -> Path:
        clock = Clock()
        return play(setting, drafters(branches, clock), checked(pair, setting, Luck(branches), clock, verify_s))

    for path, weight in every_way(text):
        joint[path] = joint.get(path, 0.0) + weight
    return distance(joint, target_joint(pair, setting.params.max_tokens))


def enumerable(mode: Verification, pair: Pair, prompt: Path = UNDECIDED, **more: Any) -> Setting:
    return Setting(SamplingParams(seed=1, max_tokens=LENGTH, verification=mode), pair.vocab, prompt, **more)


# What comes before, the seconds that the model takes, and what the blend is brought to by that.
BLENDS = {
    "the model drafts": (UNDECIDED, 0.0, "MODEL"),
    "the model goes on behind a copy": ((0,) * 7, 0.0, "PROPOSAL_THEN_MODEL"),
    "copies, for the model is slow": (UNDECIDED, 0.05, "PROPOSAL"),
}


def blended(kind: type[BlendDrafter], cost_s: float, *pairs: Pair) -> Callable[[Branches, Clock], Sequence[Drafter]]:
    """A copy, and a model for each of the pairs."""

    def drafters(branches: Branches, clock: Clock) -> Sequence[Drafter]:
        models = {pair.name: Enumerated(pair, branches, clock, cost_s) for pair in pairs}
        return [kind({"suffix": SuffixDrafter(0, 0.1, 0.1), **models}, clock)]

    return drafters


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How blends have answered where there was a copy."""
    taken: Counter[str] = Counter()
    real = BlendDrafter._choose_source

    def noting(self: BlendDrafter, session: blending._SessionState) -> blending._DraftSource:
        way = real(self, session)
        taken[way.name] += bool(session.proposed)
        return way

    monkeypatch.setattr(BlendDrafter, "_choose_source", noting)
    return taken


@pytest.mark.parametrize(("prompt", "cost_s", "way"), BLENDS.values(), ids=BLENDS.keys())
@pytest.mark.parametrize("mode", DRAWN)
def test_a_blend_does_not_bias_the_text(
    mode: Verification, prompt: Path, cost_s: float, way: str, ways: Counter[str]
) -> None:
    pair = by_path(7)
    assert bias(pair, enumerable(mode, pair, prompt=prompt), blended(BlendDrafter, cost_s, pair)) < EXACT
    assert ways[way] > 0


@pytest.mark.parametrize("mode", DRAWN)
def test_nor_does_a_blend_of_two_models(mode: Verification) -> None:
    pair = by_path(7)
    assert bias(pair, enumerable(mode, pair), blended(BlendDrafter, 0.01, by_path(10), pair)) < EXACT


ONE, OTHER = by_path(8, vocab=2), by_path(9, vocab=2)


def two(branches: Branches, clock: Clock) -> Sequence[Drafter]:
    return [Enumerated(ONE, branches), Enumerated(OTHER, branches)]


@pytest.mark.parametrize("late", LATE.values(), ids=LATE.keys())
@pytest.mark.parametrize("mode", DRAWN)
def test_two_drafters_on_one_tree_do_not_bias_the_text(mode: Verification, late: Late) -> None:
    """If what they draw is independent."""
    assert bias(ONE, enumerable(mode, ONE, late=late), two) < EXACT


@pytest.mark.parametrize("mode", DRAWN)
def test_nor_do_they_when_a_step_takes_but_one_guess(mode: Verification) -> None:
    assert bias(ONE, enumerable(mode, ONE, late=the_second, rows=1), two) < EXACT


@pytest.mark.parametrize("mode", DRAWN)
class TestEnumerationSees:
    def test_a_blend_that_picks_after_the_draw(self, mode: Verification) -> None:
        pair = by_path(7)
        assert bias(pair, enumerable(mode, pair), blended(Picky, 0.0, pair)) > SEEN

    def test_a_drafter_that_ends_its_guess_by_the_drawn_token(self, mode: Verification) -> None:
        assert bias(ONE, enumerable(mode, ONE), lambda branches, _: [Enumerated(OTHER, branches)]) < EXACT
        assert bias(ONE, enumerable(mode, ONE), lambda branches, _: [Hesitant(OTHER, branches)]) > SEEN

    def test_a_tree_that_chooses_between_two_drafters_by_value(self, mode: Verification) -> None:
        assert bias(ONE, enumerable(mode, ONE, tree=Choosy), two) > SEEN


# --- chi-square over seeded draws ------------------------------------------------------------------------------------

# By the last token. Where the first drafter is wrong it is wrong at once, and the second knows better.
TARGET = torch.tensor([[0.08, 0.46, 0.46], [0.4, 0.3, 0.3], [0.4, 0.4, 0.2]], dtype=torch.float64)
FIRST = torch.tensor([[0.45, 0.275, 0.275], [0.2, 0.2, 0.6], [0.8, 0.05, 0.15]], dtype=torch.float64)
SECOND = torch.tensor([[0.2, 0.6, 0.2], [0.4, 0.3, 0.3], [0.05, 0.9, 0.05]], dtype=torch.float64)
NEAR = torch.tensor([[0.2, 0.3, 0.5], [0.3, 0.5, 0.2], [0.2, 0.6, 0.2]], dtype=torch.float64)
LOW = torch.tensor([[0.6, 0.3, 0.1]] * 3, dtype=torch.float64)
TABLES = Pair("tables", lambda path: TARGET[path[-1] if path else PROMPT[-1]].tolist(), lambda _: pytest.fail("unused"))


class TableEngine:
    """A model that looks at the last token only: there is nothing to cache."""

    device = torch.device("cpu")
    capacity_tokens = 10**9
    evictable_tokens = 0

    def __init__(self, name: str, table: torch.Tensor, clock: Clock, cost_s: float) -> None:
        self.info = ModelInfo(name, name, vocab_size=3, context_length=1000)
        self._logits = table.log()
        self._clock = clock
        self._cost_s = cost_s

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        self._clock.now += self._cost_s
        logits = [self._logits[list(rows.tokens[rows.logits_from :])] for rows in batch]
        return StepResult(torch.cat(logits), [len(each) for each in logits], [])

    def length(self, session: str) -> int:
        return 0

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return 0

    def truncate(self, session: str, length: int) -> None: ...

    def compact(self, session: str, base: int, rows: Sequence[int]) -> None: ...

    def free(self, session: str) -> None: ...


COST_S = 0.002  # of a level of a model's draft
LOGITS = TARGET.log()


def model(table: torch.Tensor, clock: Clock) -> ModelDrafter:
    engine: Any = TableEngine("table", table, clock, COST_S)
    return ModelDrafter(LoadedModel(engine, byte_tokenizer(), SPOKEN, UNKNOWN_COST), candidates=64)


def watched(kind: type[GuessTree]) -> type[GuessTree]:
    """A tree that knows its nodes of guesses whose beginning was committed before they came."""

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.late: set[Node] = set()

        def _put(self, guess: Guess, *place: Any) -> tuple[Node, int] | None:
            size = self._size
            put: tuple[Node, int] | None = super()._put(guess, *place)
            if put is not None and self._size > size and guess.position < len(self._committed):
                self.late.add(put[0])
            return put

    return Watched


@dataclass
class Crowd:
    """Many sessions of the same drafters, one seed each."""

    mode: Verification
    drafters: Sequence[Drafter]
    clock: Clock
    late: Late = never
    branches: int = 1
    tree: type[GuessTree] = GuessTree
    accepted: int = 0
    accepted_late: int = 0  # the beginning of their guess was committed before it came
    branched: int = 0  # steps that checked more than a chain

    def texts(self, draws: int) -> list[Path]:
        return [self._text(seed) for seed in range(draws)]

    def p(self, draws: int) -> float:
        return p_value(self.texts(draws))

    def _text(self, seed: int) -> Path:
        params = SamplingParams(seed=seed, max_tokens=LENGTH, verification=self.mode)
        steering = DraftSteering(gamma=2, branches=self.branches)
        setting = Setting(params, steering=steering, late=self.late, tree=watched(self.tree))
        chance = SeededNoise(seed)

        def step(committed: Sequence[int], block: Guess, tree: Any) -> Sequence[int]:
            self.clock.now += COST_S * 10 * (seed % 4)  # the slower the target, the more a good guess is worth
            judgement = verify(LOGITS[[committed[-1], *block.tokens]], block, SessionSampling(params, None, chance))
            held = [tree.nodes(block)[row - 1] for row in judgement.outcome.path]
            self.accepted += len(held)
            self.accepted_late += sum(node in tree.late for node in held)
            self.branched += bool(block.parents)
            return judgement.tokens

        return play(setting, self.drafters, step)


def p_value(texts: Sequence[Path]) -> float:
    """The lowest of what the pairs of neighbouring tokens give, and so of single tokens."""
    joint = target_joint(TABLES, LENGTH)
    found = []
    for at in range(LENGTH - 1):
        probs: dict[Path, float] = {}
        for path, weight in joint.items():
            pair = path[at : at + 2]
            probs[pair] = probs.get(pair, 0.0) + weight
        found.append(chi_square(Counter(text[at : at + 2] for text in texts), probs, len(texts)))
    return min(found)


def blend(mode: Verification, table: torch.Tensor, kind: type[BlendDrafter] = BlendDrafter, **more: Any) -> Crowd:
    clock = Clock()
    members: dict[str, Drafter] = {"suffix": SuffixDrafter(0, 0.1, 0.1), "model": model(table, clock)}
    return Crowd(mode, [kind(members, clock)], clock, **more)


def blend_and_model(mode: Verification, **more: Any) -> Crowd:
    crowd = blend(mode, NEAR, **more)
    return replace(crowd, drafters=[*crowd.drafters, model(SECOND, crowd.clock)])


def two_models(mode: Verification, *tables: torch.Tensor, **more: Any) -> Crowd:
    clock = Clock()
    return Crowd(mode, [model(table, clock) for table in tables], clock, **more)


@pytest.mark.parametrize("mode", DRAWN)
def test_seeded_draws_of_a_blend_follow_the_target(
    mode: Verification, ways: Counter[str], record_property: Recorder
) -> None:
    p = blend(mode, NEAR).p(DRAWS)
    assert noted(f"blend, {mode.name.lower()}", p, record_property) > LOWEST_P
    assert min(ways[way] for way in ("PROPOSAL", "PROPOSAL_THEN_MODEL", "MODEL")) > DRAWS // 20


@pytest.mark.parametrize("mode", DRAWN)
def test_seeded_draws_of_a_blend_and_a_model_follow_the_target(mode: Verification, record_property: Recorder) -> None:
    crowd = blend_and_model(mode, late=the_first_at_times)
    p = crowd.p(DRAWS)
    assert noted(f"blend and model, {mode.name.lower()}", p, record_property) > LOWEST_P
    assert crowd.accepted_late > DRAWS // 20


@pytest.mark.parametrize("mode", DRAWN)
def test_seeded_draws_of_two_models_of_which_one_is_late_follow_the_target(
    mode: Verification, record_property: Recorder
) -> None:
    """`block` looks at guesses behind the one that fails: nothing of them may be found again in what comes late."""
    crowd = two_models(mode, FIRST, SECOND, late=the_second)
    p = crowd.p(DRAWS)
    assert crowd.accepted_late > DRAWS // 5
    assert noted(f"two models, {mode.name.lower()}", p, record_property) > LOWEST_P


def test_seeded_coupled_trees_follow_the_target_and_nothing_else(record_property: Recorder) -> None:
    crowd = blend_and_model(Verification.COUPLED, branches=3, late=the_second)
    texts = crowd.texts(DRAWS)
    assert noted("coupled trees", p_value(texts), record_property) > LOWEST_P
    assert crowd.branched >= DRAWS
    assert crowd.accepted > DRAWS
    assert texts == replace(crowd, drafters=[]).texts(DRAWS), "as without guesses"


class TestChiSquareSees:
    def test_a_blend_whose_model_draws_all_with_the_same_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        planted = SimpleNamespace(Use=noise.Use, exponential_race=noise.exponential_race, key=lambda seed, *_: seed)
        monkeypatch.setattr(draft_sampling, "noise", planted)
        assert blend(Verification.BLOCK, TARGET).p(FEW) < SURELY

    def test_a_blend_that_picks_after_the_draw(self) -> None:
        assert blend(Verification.REJECTION, TARGET, Picky).p(FEW) < SURELY

    def test_a_tree_that_chooses_between_two_drafters_by_value(self) -> None:
        assert two_models(Verification.BLOCK, SECOND, TARGET, tree=Choosy).p(FEW) < SURELY

    def test_a_walk_whose_rows_share_their_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def planted(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
            return coupled_draws(logits, params, [positions[0]] * len(positions))

        monkeypatch.setattr(verification, "coupled_draws", planted)
        assert blend(Verification.COUPLED, NEAR, branches=3).p(FEW) < SURELY

    def test_a_walk_that_takes_the_first_of_siblings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def planted(block: Guess, drawn: Sequence[int]) -> Outcome:
            parents = block.shape.parents
            firsts = [
                block.tokens[parents.index(row - 1)] if row - 1 in parents else token for row, token in enumerate(drawn)
            ]
            return acceptance.walk(block, firsts)

        monkeypatch.setattr(verification, "acceptance", SimpleNamespace(walk=planted))
        assert blend(Verification.COUPLED, LOW, branches=3).p(FEW) < SURELY
