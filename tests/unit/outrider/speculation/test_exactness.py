"""Invariant 1: whatever is guessed, the text follows the target. First by exact enumeration, then by seeded
chi-square, and last the proof that both checkers see the bugs that they are there for."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from drafter.session import DraftOpening, DraftSession
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution, DraftSteering, Guess, TokenKind
from outrider.speculation import acceptance, noise, sampling
from outrider.speculation.acceptance import Outcome, RandomSource, Residual, SeededNoise
from outrider.speculation.exponential_race import shared_draw
from outrider.speculation.noise import Use
from outrider.speculation.tree import GuessTree
from tests.unit.outrider.speculation import rules

T = TypeVar("T")
Path = tuple[int, ...]
Rule = Callable[[Sequence[int], torch.Tensor, Sequence[Distribution], int, RandomSource], Outcome]

EXACT = 1e-9
ROUNDING = 1e-13  # a chance of less is an exact 0 that arithmetic has blurred
DRAWS = 131_072
LOWEST_P = 1e-4
RULES = [rules.rejection, rules.block]
START = 10  # tokens committed before the first guess


# --- a target and a drafter over a tiny vocabulary -------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """What target and drafter think, given the path since START."""

    name: str
    target: Callable[[Path], Sequence[float]]
    draft: Callable[[Path], Distribution]
    vocab: int = 3

    def rows(self, path: Path) -> torch.Tensor:
        """The target's answers to the block `path`.  # [1 + guesses, vocab]"""
        return torch.tensor([self.target(path[:i]) for i in range(len(path) + 1)], dtype=torch.float64)


def parts(probs: Sequence[float]) -> Distribution:
    """Whole parts of 65536; ids of no weight are left out, as on the wire."""
    weights = [math.floor(p * WHOLE) for p in probs]
    weights[max(range(len(probs)), key=weights.__getitem__)] += WHOLE - sum(weights)
    kept = [(token, weight) for token, weight in enumerate(weights) if weight]
    return Distribution(tuple(t for t, _ in kept), tuple(w for _, w in kept))


def fixed(name: str, target: Sequence[float], draft: Sequence[float]) -> Pair:
    return Pair(name, lambda _: target, lambda _: parts(draft), len(target))


def by_path(seed: int, vocab: int = 3, sharpness: float = 2.0) -> Pair:
    """Distributions that depend on the whole path."""

    @functools.cache
    def probs(who: str, path: Path) -> tuple[float, ...]:
        source = random.Random(f"{seed}{who}{path}")
        weights = [source.random() ** sharpness + 0.01 for _ in range(vocab)]
        return tuple(weight / sum(weights) for weight in weights)

    return Pair(f"by path {seed}", lambda path: probs("target", path), lambda path: parts(probs("draft", path)), vocab)


def guesser_of_points(path: Path) -> Distribution:
    """What an n-gram drafter sends: certainty."""
    return Distribution(((sum(path) + len(path)) % 3,), (WHOLE,))


PAIRS = [
    fixed("unlike", [0.1, 0.6, 0.3], [0.5, 0.2, 0.3]),
    fixed("identical", [0.25, 0.5, 0.25], [0.25, 0.5, 0.25]),
    fixed("the draft leaves a token out", [0.2, 0.5, 0.3], [0.75, 0.0, 0.25]),
    fixed("the target excludes what is drafted", [0.0, 0.4, 0.6], [0.5, 0.25, 0.25]),
    fixed("nothing in common", [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]),
    fixed("a certain draft", [0.2, 0.5, 0.3], [0.0, 1.0, 0.0]),
    fixed("a certain target", [1.0, 0.0, 0.0], [0.3, 0.4, 0.3]),
    fixed("two ids", [0.9, 0.1], [0.35, 0.65]),
    by_path(1),
    by_path(2, sharpness=5.0),
    by_path(3, sharpness=0.5),
    Pair("points by path", by_path(4).target, guesser_of_points),
    by_path(5, vocab=4),
]


# --- enumeration -----------------------------------------------------------------------------------------------------


class Branches:
    """A RandomSource that follows a script of decisions and notes the alternatives beyond it."""

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self._asked = 0
        self.weight = 1.0
        self.others: list[list[int]] = []

    def pick(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > sum(weights) * ROUNDING]
        if self._asked == len(self._script):
            self.others += [[*self._script, other] for other in possible[1:]]
            self._script.append(possible[0])
        taken = self._script[self._asked]
        self._asked += 1
        self.weight *= weights[taken] / sum(weights)
        return taken

    def token(self, distribution: Distribution) -> int:
        return distribution.ids[self.pick(distribution.weights)]

    def accept(self, probability: float, position: int, block: int) -> bool:
        assert -EXACT <= probability <= 1.0 + EXACT
        return self.pick([max(0.0, 1.0 - probability), probability]) == 1

    def draw(self, weights: torch.Tensor, position: int) -> int:
        return self.pick(weights.tolist())


def every_way(play: Callable[[Branches], T]) -> Iterator[tuple[T, float]]:
    """All that can happen, each with its probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        branches = Branches(scripts.pop())
        yield play(branches), branches.weight
        scripts += branches.others


def target_joint(pair: Pair, length: int) -> dict[Path, float]:
    return {
        path: math.prod(pair.target(path[:i])[token] for i, token in enumerate(path))
        for path in itertools.product(range(pair.vocab), repeat=length)
    }


def completed(pair: Pair, outputs: dict[Path, float], length: int) -> dict[Path, float]:
    """Outputs cut or, by the target's own conditionals, lengthened to `length` tokens."""
    joint: dict[Path, float] = {}
    for path, weight in outputs.items():
        missing = max(0, length - len(path))
        for rest in itertools.product(range(pair.vocab), repeat=missing):
            whole = path + rest
            chance = math.prod(pair.target(whole[:i])[whole[i]] for i in range(len(path), len(whole)))
            joint[whole[:length]] = joint.get(whole[:length], 0.0) + weight * chance
    return joint


def distance(joint: dict[Path, float], wanted: dict[Path, float]) -> float:
    return max(abs(joint.get(path, 0.0) - wanted.get(path, 0.0)) for path in joint.keys() | wanted.keys())


def honest(pair: Pair, n: int, branches: Branches) -> tuple[Path, tuple[Distribution, ...]]:
    """n guesses, each drawn from the distribution that goes with it."""
    path: Path = ()
    drawn_from: tuple[Distribution, ...] = ()
    while len(path) < n:
        drawn_from += (pair.draft(path),)
        path += (branches.token(drawn_from[-1]),)
    return path, drawn_from


def outputs_of(rule: Rule, pair: Pair, n: int, guesser=honest) -> tuple[dict[Path, float], float]:
    """The output tokens of one block with their probabilities, and the expected number of accepted guesses."""

    def play(branches: Branches) -> tuple[Path, int]:
        guesses, drawn_from = guesser(pair, n, branches)
        outcome = rule(guesses, pair.rows(guesses), drawn_from, START, branches)
        assert outcome.path == tuple(range(1, len(outcome.path) + 1))
        return (*guesses[: len(outcome.path)], outcome.final), len(outcome.path)

    outputs: dict[Path, float] = {}
    accepted = 0.0
    for (tokens, count), weight in every_way(play):
        outputs[tokens] = outputs.get(tokens, 0.0) + weight
        accepted += weight * count
    assert sum(outputs.values()) == pytest.approx(1.0, abs=EXACT)
    return outputs, accepted


def violation(rule: Rule, pair: Pair, n: int, guesser=honest) -> float:
    """How far the rule's text is from the target's."""
    outputs, _ = outputs_of(rule, pair, n, guesser)
    return distance(completed(pair, outputs, n + 1), target_joint(pair, n + 1))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
@pytest.mark.parametrize("rule", RULES)
def test_the_text_of_a_block_is_exactly_the_targets(rule: Rule, pair: Pair) -> None:
    for n in range(4 if pair.vocab < 4 else 3):
        assert violation(rule, pair, n) < EXACT


probabilities = st.lists(st.integers(0, 8), min_size=3, max_size=3).filter(any).map(lambda w: [x / sum(w) for x in w])


@settings(max_examples=30, deadline=None)
@given(target=st.lists(probabilities, min_size=4, max_size=4), draft=st.lists(probabilities, min_size=4, max_size=4))
def test_random_distributions_with_zeros_are_exact_under_both_rules(
    target: list[list[float]], draft: list[list[float]]
) -> None:
    """Row 0 for the first token, then one by the last token."""
    pair = Pair(
        "random",
        lambda path: target[path[-1] + 1 if path else 0],
        lambda path: parts(draft[path[-1] + 1 if path else 0]),
    )
    for rule in RULES:
        assert violation(rule, pair, 2) < EXACT


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_block_accepts_at_least_what_rejection_accepts(pair: Pair) -> None:
    for n in (1, 2, 3) if pair.vocab < 4 else (1, 2):
        _, by_token = outputs_of(rules.rejection, pair, n)
        _, by_block = outputs_of(rules.block, pair, n)
        assert by_block >= by_token - EXACT


def test_block_accepts_more_where_blocks_matter() -> None:
    _, by_token = outputs_of(rules.rejection, PAIRS[0], 3)
    _, by_block = outputs_of(rules.block, PAIRS[0], 3)
    assert by_block > by_token * 1.02


@pytest.mark.parametrize("rule", RULES)
def test_identical_models_lose_no_guess(rule: Rule) -> None:
    outputs, accepted = outputs_of(rule, PAIRS[1], 3)
    assert accepted == 3.0
    assert all(len(path) == 4 for path in outputs)


@pytest.mark.parametrize("rule", RULES)
def test_the_last_token_is_called_what_it_is(rule: Rule) -> None:
    sure, other = fixed("sure", [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]), fixed("other", [0.0, 1.0, 0.0], [1.0, 0.0, 0.0])

    def kind(pair: Pair, n: int) -> TokenKind:
        guesses, drawn_from = honest(pair, n, Branches([]))
        return rule(guesses, pair.rows(guesses), drawn_from, START, Branches([])).kind

    assert kind(sure, 0) is TokenKind.PLAIN
    assert kind(sure, 2) is TokenKind.BONUS
    assert kind(other, 2) is TokenKind.RECOVERED


# --- the same over several steps, through the guess tree and the drafter's own session -------------------------------


@dataclass(frozen=True)
class Schedule:
    """When things happen; none of it may show in the text."""

    gamma: int
    rows: tuple[int, ...]  # guesses that the steps take at most, the last for ever; 0: a plain step
    late: bool = False  # a commit reaches the drafter only after it has drafted once more


SCHEDULES = {
    "in step": Schedule(2, (9,)),
    "a chain checked in two parts": Schedule(3, (1,)),
    "a plain step before the guess is seen": Schedule(2, (0, 9)),
    "pipelined": Schedule(2, (1, 9), late=True),
    "drafting ahead of news": Schedule(1, (9,), late=True),
}


def serve(rule: Rule, mode: Verification, pair: Pair, schedule: Schedule, length: int, branches: Branches) -> Path:
    """The first `length` tokens of a session."""
    prompt = [0] * START
    committed = list(prompt)
    params = SamplingParams(seed=1, max_tokens=length, verification=mode)
    tree = GuessTree(committed, single=True, max_nodes=64, max_ahead=8)
    drafter = DraftSession(
        DraftOpening("s", 0, tuple(prompt), START, params, pair.vocab, DraftSteering(gamma=schedule.gamma))
    )

    def draft() -> None:
        while (ask := drafter.next_request()) is not None:
            drawn_from = pair.draft(tuple(ask.tokens[START:]))
            drafter.add_guess(ask.chain([branches.token(drawn_from)], [drawn_from]), 0)
        while (guess := drafter.next_message()) is not None:
            tree.add(guess)

    steps = 0
    news: list[tuple[int, Path]] = []
    while len(committed) < START + length:
        draft()
        for position, tokens in news:
            drafter.commit(position, tokens)
        news.clear()
        if not schedule.late:
            draft()
        rows = schedule.rows[min(steps, len(schedule.rows) - 1)]
        block = tree.block(rows, START + length - len(committed) - 1)
        path = tuple(committed[START:])
        answers = pair.rows(path + block.tokens)[len(path) :]
        outcome = rule(block.tokens, answers, block.draft_probs, len(committed), branches)
        new = (*block.tokens[: len(outcome.path)], outcome.final)
        news.append((len(committed), new))
        committed.extend(new)
        tree.commit(new)
        steps += 1
    return tuple(committed[START:])


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("mode", [Verification.REJECTION, Verification.BLOCK])
def test_guesses_that_outlive_a_step_do_not_bias_the_text(mode: Verification, schedule: Schedule) -> None:
    rule = rules.block if mode is Verification.BLOCK else rules.rejection
    for pair, length in ((by_path(7), 3), (PAIRS[0], 3), (by_path(8, vocab=2), 4)):
        joint: dict[Path, float] = {}
        for text, weight in every_way(lambda b, p=pair, n=length: serve(rule, mode, p, schedule, n, b)):
            joint[text] = joint.get(text, 0.0) + weight
        assert distance(joint, target_joint(pair, length)) < EXACT


@pytest.mark.parametrize("seed", range(20))
def test_a_recovered_token_is_never_the_guess_that_it_replaces(seed: int) -> None:
    """Else what hangs from that guess would live on although `block` has already looked at it."""
    pair = by_path(seed)

    def play(branches: Branches) -> bool:
        guesses, drawn_from = honest(pair, 3, branches)
        outcome = rules.block(guesses, pair.rows(guesses), drawn_from, START, branches)
        return outcome.kind is TokenKind.RECOVERED and guesses[len(outcome.path)] == outcome.final

    assert sum(weight for same, weight in every_way(play) if same) < 1e-12


# --- the checkers see planted bugs -----------------------------------------------------------------------------------


def bonus_from_the_wrong_row(rule: Rule) -> Rule:
    def planted(tokens, target, draft, position, chance):
        return rule(tokens, torch.cat([target[:-1], target[-2:-1]]), draft, position, chance)

    return planted


def accepting_too_much(rule: Rule) -> Rule:
    class Generous:
        def __init__(self, chance: RandomSource) -> None:
            self.draw = chance.draw
            self._chance = chance

        def accept(self, probability: float, position: int, block: int) -> bool:
            return self._chance.accept(min(1.0, probability * 1.05), position, block)

    return lambda tokens, target, draft, position, chance: rule(tokens, target, draft, position, Generous(chance))


def withholding(pair: Pair, n: int, branches: Branches) -> tuple[Path, tuple[Distribution, ...]]:
    """Stops before a drawn token that the target would hardly say."""
    guesses, drawn_from = honest(pair, n, branches)
    for i, token in enumerate(guesses):
        if pair.target(guesses[:i])[token] < 0.25:
            return guesses[:i], drawn_from[:i]
    return guesses, drawn_from


def withholding_by_id(pair: Pair, n: int, branches: Branches) -> tuple[Path, tuple[Distribution, ...]]:
    guesses, drawn_from = honest(pair, n, branches)
    cut = guesses.index(0) if 0 in guesses else n
    return guesses[:cut], drawn_from[:cut]


def stopping_after_doubt(pair: Pair, n: int, branches: Branches) -> tuple[Path, tuple[Distribution, ...]]:
    """Allowed: the doubtful token is still sent."""
    guesses, drawn_from = honest(pair, n, branches)
    for i, token in enumerate(guesses, start=1):
        if pair.target(guesses[: i - 1])[token] < 0.25:
            return guesses[:i], drawn_from[:i]
    return guesses, drawn_from


def cutting_after_the_draw(pair: Pair, n: int, branches: Branches) -> tuple[Path, tuple[Distribution, ...]]:
    """Draws from the full distribution and sends its best two ids only."""
    guesses, drawn_from = honest(pair, n, branches)

    def cut(token: int, distribution: Distribution) -> Distribution:
        weights = dict(zip(distribution.ids, distribution.weights, strict=True))
        best = sorted({token, max(weights, key=weights.__getitem__)})
        return parts([weights[i] / sum(weights[j] for j in best) if i in best else 0.0 for i in range(pair.vocab)])

    return guesses, tuple(cut(token, d) for token, d in zip(guesses, drawn_from, strict=True))


SEEN = 1e-3


def plant_residuals(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Residual], Residual]) -> None:
    """Let the rules take other residuals than those they ask for."""
    real = acceptance.residuals
    monkeypatch.setattr(acceptance, "residuals", lambda target, wanted: real(target, [plant(each) for each in wanted]))


@pytest.mark.parametrize("rule", RULES)
class TestEnumerationSees:
    pair = by_path(1)

    def test_a_bonus_from_the_wrong_row(self, rule: Rule) -> None:
        assert violation(bonus_from_the_wrong_row(rule), self.pair, 2) > SEEN

    def test_recovery_from_the_target_instead_of_the_residual(
        self, rule: Rule, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant_residuals(monkeypatch, lambda wanted: replace(wanted, draft=None))
        assert violation(rule, self.pair, 2) > SEEN

    def test_a_residual_that_is_not_cut_at_zero(self, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
        real = acceptance.residuals

        def planted(target: torch.Tensor, wanted: Sequence[Residual]) -> torch.Tensor:
            return real(target, wanted) + torch.tensor([[0.0 if each.draft is None else 0.02] for each in wanted])

        monkeypatch.setattr(acceptance, "residuals", planted)
        assert violation(rule, self.pair, 2) > SEEN

    def test_a_little_too_much_acceptance(self, rule: Rule) -> None:
        assert violation(accepting_too_much(rule), self.pair, 2) > SEEN

    @pytest.mark.parametrize("guesser", [withholding, withholding_by_id, cutting_after_the_draw])
    def test_a_dishonest_drafter(self, rule: Rule, guesser) -> None:
        assert violation(rule, self.pair, 2, guesser) > SEEN

    def test_that_stopping_after_a_doubtful_token_is_fine(self, rule: Rule) -> None:
        assert violation(rule, self.pair, 3, stopping_after_doubt) < EXACT


def test_enumeration_sees_a_block_rule_that_forgets_what_it_has_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_residuals(monkeypatch, lambda wanted: replace(wanted, scale=1.0))
    assert violation(rules.block, PAIRS[0], 2) > SEEN


def test_a_tree_that_chooses_among_drawn_siblings_by_value_would_bias_the_text() -> None:
    """Two drawn tokens, the likelier one kept: why a single tree keeps whatever came first."""

    def choosy(pair: Pair, n: int, branches: Branches) -> tuple[Path, tuple[Distribution, ...]]:
        drawn_from = pair.draft(())
        both = [branches.token(drawn_from), branches.token(drawn_from)]
        return (max(both, key=pair.target(()).__getitem__),), (drawn_from,)

    assert violation(rules.rejection, PAIRS[0], 1, choosy) > SEEN


# --- coupled and greedy: the text is a function of target, parameters and seed ---------------------------------------

VOCAB = 6
coupled_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 2, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
)


def logits_after(model: int, path: Sequence[int]) -> torch.Tensor:
    source = random.Random(f"{model}{list(path)}")
    return torch.tensor([source.gauss(0.0, 1.5) for _ in range(VOCAB)])


def plain_text(model: int, params: SamplingParams, length: int) -> list[int]:
    """One token at a time, no guesses."""
    text: list[int] = []
    for i in range(length):
        text += shared_draw(logits_after(model, text)[None], params, [START + i])
    return text


@settings(max_examples=60, deadline=None)
@given(data=st.data(), params=coupled_params, model=st.integers(0, 5))
def test_any_tree_of_guesses_yields_the_plain_text(data: st.DataObject, params: SamplingParams, model: int) -> None:
    """Guesses are right, wrong, branching, far ahead or absurd; every step's tree is checked by one walk."""
    length = 8
    wanted = plain_text(model, params, length)
    committed = [0] * START
    tree = GuessTree(committed, single=False, max_nodes=12, max_ahead=6)
    next_id = 1
    while len(committed) < START + length:
        said = len(committed) - START
        for _ in range(data.draw(st.integers(0, 3))):
            right = data.draw(st.integers(0, 4))
            wrong = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
            tokens = (*wanted[said : said + right], *wrong)
            if tokens:
                tree.add(Guess(len(committed), next_id, 0, tokens))
                next_id += len(tokens)
        block = tree.block(data.draw(st.integers(0, 12)), START + length - len(committed) - 1)
        paths = block.paths
        logits = torch.stack([logits_after(model, [*committed[START:], *path]) for path in paths])
        drawn = shared_draw(logits, params, [len(committed) + len(path) for path in paths])
        outcome = acceptance.walk(block, drawn)
        new = [*(block.tokens[row - 1] for row in outcome.path), outcome.final]
        assert new == wanted[said : said + len(new)]
        # Nothing that was guessed right and offered is wasted.
        right_paths = [path for path in paths if list(path) == wanted[said : said + len(path)]]
        assert len(outcome.path) == max(map(len, right_paths))
        committed.extend(new)
        tree.commit(new)
    assert committed[START:] == wanted


def test_walk_calls_the_last_token_what_it_is() -> None:
    assert acceptance.walk(Guess(0, 0, 0, ()), [4]) == Outcome((), 4, TokenKind.PLAIN)
    chain, tree = Guess(0, 0, 0, (7, 8)), Guess(0, 0, 0, (6, 7, 8), parents=(-1, -1, 1))
    assert acceptance.walk(chain, [7, 8, 9]) == Outcome((1, 2), 9, TokenKind.BONUS)
    assert acceptance.walk(chain, [7, 5, 9]) == Outcome((1,), 5, TokenKind.RECOVERED)
    assert acceptance.walk(tree, [7, 1, 8, 9]) == Outcome((2, 3), 9, TokenKind.BONUS)


# --- chi-square over seeded draws ------------------------------------------------------------------------------------


def chi_square(seen: Counter, probs: dict[Path, float], draws: int) -> float:
    """p-value of the counts; what cannot be and yet is has none."""
    if any(probs[cell] == 0.0 for cell in seen):
        return 0.0
    possible = [cell for cell, p in probs.items() if p > 0.0]
    assert min(probs[cell] for cell in possible) * draws > 5.0
    return float(stats.chisquare([seen[cell] for cell in possible], [probs[cell] * draws for cell in possible]).pvalue)


class Chain:
    """A target and a drafter that look at the last token, as tables: for many draws at once.

    Row 0 is for the first token, row t + 1 for what follows token t.
    """

    vocab = 3
    target = torch.tensor([[0.1, 0.4, 0.5], [0.4, 0.5, 0.1], [0.5, 0.1, 0.4], [0.3, 0.4, 0.3]], dtype=torch.float64)
    draft = torch.tensor([[0.5, 0.1, 0.4], [0.1, 0.4, 0.5], [0.4, 0.5, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64)

    def __init__(self) -> None:
        self.drawn_from = [parts(row.tolist()) for row in self.draft]
        self.weights = torch.tensor([d.weights for d in self.drawn_from])
        self.pair = Pair("tables", lambda p: self.target[p[-1] + 1 if p else 0].tolist(), self._draft)
        self.rows = {path: self.pair.rows(path) for path in itertools.product(range(3), repeat=2)}

    def drafts(self, pair: Path) -> tuple[Distribution, Distribution]:
        return self.drawn_from[0], self.drawn_from[pair[0] + 1]

    def _draft(self, path: Path) -> Distribution:
        return self.drawn_from[path[-1] + 1 if path else 0]


IDS = torch.arange(3)
KeyOf = Callable[[int, int], int]  # of seed and position


def own_noise(seed: int, position: int) -> int:
    """As drafter/methods/model.py does."""
    return noise.key(seed, Use.DRAFT, position, START)


def guesses_of(chain: Chain, draws: int, key: KeyOf) -> list[Path]:
    """Two guesses per seed, drawn from the drafter's tables."""
    before = torch.zeros(draws, dtype=torch.int64)
    columns = []
    for i in range(2):
        keys = [key(seed, START + i) for seed in range(draws)]
        before = noise.exponential_race(keys, IDS, chain.weights[before]) + 1
        columns.append(before - 1)
    return [tuple(pair) for pair in torch.stack(columns, dim=1).tolist()]


def one_by_one(rule: Rule, guesses: Sequence[Path], chain: Chain) -> list[Outcome]:
    return [
        rule(pair, chain.rows[pair], chain.drafts(pair), START, SeededNoise(seed)) for seed, pair in enumerate(guesses)
    ]


def together(rule: Rule, guesses: Sequence[Path], chain: Chain) -> list[Outcome]:
    """As sessions of a step, thousands at a time."""
    mode = Verification.BLOCK if rule is rules.block else Verification.REJECTION
    outcomes: list[Outcome] = []
    for start in range(0, len(guesses), 8192):
        part = guesses[start : start + 8192]
        outcomes += acceptance.verify_drawn(
            [Guess(START, 0, 0, pair, chain.drafts(pair)) for pair in part],
            [mode] * len(part),
            [SeededNoise(start + i) for i in range(len(part))],
            torch.cat([chain.rows[pair] for pair in part]),
        )
    return outcomes


def first_three(rule: Rule, draws: int, guesses: Sequence[Path], chain: Chain) -> Counter:
    """The first three tokens of each seed's text: one block, then plain tokens, all with the production noise."""
    outcomes = together(rule, guesses, chain) if rule in RULES else one_by_one(rule, guesses, chain)
    texts = [[*pair[: len(outcome.path)], outcome.final] for pair, outcome in zip(guesses, outcomes, strict=True)]
    for length in (1, 2):
        short = [seed for seed, text in enumerate(texts) if len(text) == length]
        keys = [noise.key(seed, Use.FINAL, START + length) for seed in short]
        last = torch.tensor([texts[seed][-1] for seed in short])
        for seed, token in zip(short, noise.exponential_race(keys, IDS, chain.target[last + 1]).tolist(), strict=True):
            texts[seed].append(token)
    return Counter(tuple(text) for text in texts)


def noted(name: str, p: float, record_property: Callable[[str, object], None]) -> float:
    record_property(f"p_value_{name}", p)
    print(f"chi-square, {name}: p = {p:.4f}")
    return p


@pytest.mark.parametrize("rule", RULES)
def test_seeded_draws_under_a_rule_follow_the_target(rule: Rule, record_property) -> None:
    chain = Chain()
    seen = first_three(rule, DRAWS, guesses_of(chain, DRAWS, own_noise), chain)
    p = noted(rule.__name__, chi_square(seen, target_joint(chain.pair, 3), DRAWS), record_property)
    assert p > LOWEST_P


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("coupled", SamplingParams(seed=7)),
        ("coupled with top-k", SamplingParams(seed=8, temperature=0.8, top_k=4)),
        ("coupled with top-p", SamplingParams(seed=9, temperature=1.3, top_p=0.9)),
    ],
)
def test_seeded_coupled_draws_follow_the_target(name: str, params: SamplingParams, record_property) -> None:
    """Neighbouring positions of one seed, as pairs: each must be right and the two independent."""
    logits = torch.tensor([[0.3, -0.5, 1.1, 0.0, -1.2]])
    row = sampling.candidates(logits, params).dense(5)[0].tolist()
    tokens = shared_draw(logits.expand(2 * DRAWS, -1), params, range(2 * DRAWS))
    seen = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    probs = {(a, b): row[a] * row[b] for a in range(5) for b in range(5)}
    assert noted(name, chi_square(seen, probs, DRAWS), record_property) > LOWEST_P


def test_coupled_draws_of_different_seeds_are_independent(record_property) -> None:
    weights = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    row = weights[0].tolist()
    keys = [noise.key(seed, Use.COUPLED, START) for seed in range(2 * DRAWS)]
    tokens = noise.exponential_race(keys, IDS, weights.expand(2 * DRAWS, -1)).tolist()
    seen = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    probs = {(a, b): row[a] * row[b] for a in range(3) for b in range(3)}
    assert noted("neighbouring seeds", chi_square(seen, probs, DRAWS), record_property) > LOWEST_P


class TestChiSquareSees:
    """A sixteenth of the draws is plenty for a real bug."""

    draws = DRAWS // 16
    surely = 1e-9

    def _p(self, rule: Rule, guesses: Sequence[Path], chain: Chain) -> float:
        return chi_square(first_three(rule, self.draws, guesses, chain), target_joint(chain.pair, 3), self.draws)

    @pytest.mark.parametrize("rule", RULES)
    def test_a_drafter_that_shares_the_noise_of_the_final_draw(self, rule: Rule) -> None:
        chain = Chain()
        shared = guesses_of(chain, self.draws, lambda seed, position: noise.key(seed, Use.FINAL, position))
        assert self._p(rule, shared, chain) < self.surely

    @pytest.mark.parametrize("rule", RULES)
    def test_a_drafter_that_shares_the_noise_of_the_acceptance(self, rule: Rule) -> None:
        chain = Chain()

        def by_inversion(row: torch.Tensor, luck: float) -> int:
            return int(torch.searchsorted(row.cumsum(0), torch.tensor(luck, dtype=row.dtype)).clamp(max=2))

        guesses = []
        for seed in range(self.draws):
            first = by_inversion(chain.draft[0], noise.uniform(seed, Use.ACCEPT, START, START))
            second = by_inversion(chain.draft[first + 1], noise.uniform(seed, Use.ACCEPT, START + 1, START))
            guesses.append((first, second))
        assert self._p(rule, guesses, chain) < self.surely

    def test_the_coupled_noise_under_rejection(self) -> None:
        """The bug of the big engine: one noise for the guess and for the target's own draw."""
        chain = Chain()

        class Coupled(SeededNoise):
            def __init__(self, seed: int) -> None:
                super().__init__(seed)
                self.seed = seed

            def draw(self, weights: torch.Tensor, position: int) -> int:
                return int(noise.exponential_race([noise.key(self.seed, Use.COUPLED, position)], IDS, weights[None])[0])

        def planted(tokens, target, draft, position, chance):
            return rules.rejection(tokens, target, draft, position, Coupled(chance._seed))

        guesses = guesses_of(chain, self.draws, lambda seed, position: noise.key(seed, Use.COUPLED, position))
        assert self._p(planted, guesses, chain) < self.surely

    def test_a_bonus_from_the_wrong_row(self) -> None:
        chain = Chain()
        guesses = guesses_of(chain, self.draws, own_noise)
        assert self._p(bonus_from_the_wrong_row(rules.rejection), guesses, chain) < self.surely


# --- rare tokens -----------------------------------------------------------------------------------------------------

RARE = 1e-6
RARE_DRAWS = 30 * 2**20
CHUNK = 2**20


def poisson_bounds(mean: float, outside: float = 1e-4) -> tuple[int, int]:
    return int(stats.poisson.ppf(outside / 2, mean)), int(stats.poisson.isf(outside / 2, mean))


def rare_wins() -> int:
    """How often a token of probability RARE is drawn against a certain one. A chunk is one key and many pairs of ids:
    the noise is a hash of both."""
    weights = torch.tensor([[1.0 - RARE, RARE]], dtype=torch.float64).expand(CHUNK, 2)
    return sum(
        int(
            noise.exponential_race(
                [noise.key(5, Use.COUPLED, chunk)], torch.arange(2 * CHUNK).view(CHUNK, 2), weights
            ).sum()
        )
        for chunk in range(RARE_DRAWS // CHUNK)
    )


Exponentials = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def coarse(bits: int) -> Exponentials:
    """Exponentials of fewer random bits."""

    def exponentials(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        uniform = -torch.expm1(-real(keys, ids))
        return -torch.log1p(-((uniform * 2.0**bits).floor() + 0.5) * 2.0**-bits)

    real = noise.exponentials
    return exponentials


def single_precision() -> Exponentials:
    """The usual −log(u), in float32."""
    real = noise.exponentials
    return lambda keys, ids: -torch.exp(-real(keys, ids)).to(torch.float32).log()


def test_a_token_of_one_in_a_million_is_drawn_at_its_rate(record_property) -> None:
    low, high = poisson_bounds(RARE * RARE_DRAWS)
    wins = rare_wins()
    record_property("rare_wins", wins)
    print(f"token of probability {RARE:g}: drawn {wins} times in {RARE_DRAWS}, bounds [{low}, {high}]")
    assert low > 0
    assert low <= wins <= high


def test_noise_of_sixteen_bits_would_miss_that_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "exponentials", coarse(16))
    low, high = poisson_bounds(RARE * RARE_DRAWS)
    assert not low <= rare_wins() <= high


def distinct_among_the_lowest() -> int:
    """How many of the thousand smallest of 2^23 exponentials differ: such ones are what rare tokens win with."""
    lowest = noise.exponentials(torch.tensor(12345), torch.arange(2**23)).topk(1000, largest=False).values
    return len(set(lowest.tolist()))


def test_rare_tokens_are_told_apart() -> None:
    assert distinct_among_the_lowest() == 1000


@pytest.mark.parametrize("planted", [coarse(24), single_precision()], ids=["24 bits", "single precision"])
def test_noise_of_less_precision_would_make_rare_tokens_tie(planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties go to the lowest id, and below 2^-24 to nobody."""
    monkeypatch.setattr(noise, "exponentials", planted)
    assert distinct_among_the_lowest() < 900
