"""Invariant 1 with a grammar: the text follows the target over the tokens that the grammar lets follow, whatever is
guessed. The grammar's words are enumerated here, the session, drafter's choice, tree and judge are the real ones."""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from drafter import draft_sampling
from drafter.grammar import GrammarCursor
from drafter.session import DraftOpening as Drafted
from drafter.session import DraftSession as Drafting
from drafter.tree_builder import TreeBuilder
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import Grammar, SamplingParams, Verification
from outrider.protocol.speculation import DraftSteering, FinishReason, TokenKind, Verdict
from outrider.speculation import sampling
from outrider.speculation.acceptance import RandomSource, SeededNoise
from outrider.speculation.grammar import GrammarCompiler
from outrider.speculation.verification import SessionSampling
from outrider.testing.toy_models import byte_tokenizer
from tests.unit.outrider.speculation.rules import verify
from tests.unit.outrider.speculation.test_exactness import (
    EXACT,
    LOWEST_P,
    Branches,
    Path,
    chi_square,
    distance,
    every_way,
)
from verifier.session import VerifyOpening, VerifySession

LETTERS = "abc"
END = 3
VOCAB = 4
PROMPT = (0, 1, 2)
START = len(PROMPT)
LENGTH = 3
REGEX = "a(b|c)*|(ba)*c?|cc"
INFO = ModelInfo("tables", "tables", vocab_size=VOCAB, context_length=100, eos_token_ids=(END,))
GRAMMARS = GrammarCompiler(partial(tokenizer_json, byte_tokenizer(letters=LETTERS)), [END])
DRAWN = [Verification.REJECTION, Verification.BLOCK]
CPU = torch.device("cpu")

WORDS = {
    word
    for n in range(LENGTH + 4)
    for letters in product(LETTERS, repeat=n)
    if re.fullmatch(REGEX, word := "".join(letters))
}


@functools.cache
def logits(who: str, path: Path) -> tuple[float, ...]:
    source = random.Random(f"{who}{path}")
    return tuple(source.uniform(-2.0, 2.0) for _ in range(VOCAB))


def rows(who: str, paths: Sequence[Path]) -> torch.Tensor:
    return torch.tensor([logits(who, path) for path in paths], dtype=torch.float64)


def followers(text: str) -> set[str]:
    return {word[len(text)] for word in WORDS if word.startswith(text) and len(word) > len(text)}


def over(path: Path) -> bool:
    """Whether a text is at its end: its end token is there, or nothing can follow."""
    return END in path or (len(path) > 0 and not followers("".join(LETTERS[token] for token in path)))


def wanted(ignore_eos: bool = False) -> dict[Path, float]:
    """Every text with its probability, by the words alone."""
    joint: dict[Path, float] = {}

    def go(path: Path, weight: float) -> None:
        if len(path) == LENGTH or over(path):
            joint[path] = joint.get(path, 0.0) + weight
            return
        text = "".join(LETTERS[token] for token in path)
        able = [LETTERS.index(letter) for letter in followers(text)]
        if text in WORDS and not (able and ignore_eos):
            able.append(END)
        shares = {token: math.exp(logits("target", path)[token]) for token in able}
        for token, share in shares.items():
            go((*path, token), weight * share / sum(shares.values()))

    go((), 1.0)
    assert sum(joint.values()) == pytest.approx(1.0)
    return joint


class Both:
    """A session at the verifier and at a drafter."""

    def __init__(self, params: SamplingParams, *, blind: bool = False, gamma: int = 2, branches: int = 1) -> None:
        self.params = params
        self.verifier = VerifySession(VerifyOpening("s", 1, PROMPT, START, params), INFO, CPU, GRAMMARS.compile(params))
        grammar_cursor = None if blind else GrammarCursor(GRAMMARS.compile(params), START)
        opening = Drafted("s", 1, PROMPT, START, params, VOCAB, DraftSteering(gamma=gamma, branches=branches))
        self.drafter = Drafting(opening, grammar_cursor=grammar_cursor)
        self.accepted = 0

    @property
    def text(self) -> Path:
        return tuple(self.verifier.committed[START:])

    def guess(self) -> None:
        while (guess := self.drafter.next_message()) is not None:
            self.verifier.add_guess(guess)

    def step(self, chance: RandomSource) -> bool:
        """One forward pass; whether the output has ended."""
        session = self.verifier
        block = session.block(9)
        path = self.text
        answers = rows("target", [(*path, *ahead) for ahead in block.paths])
        assert session.guide is not None
        allowed = session.guide.allowed(block.paths, VOCAB)
        position = len(session.committed)
        judged = verify(answers, block, SessionSampling(self.params, None, chance, allowed))
        tokens, reason = session.truncate_output(judged.tokens, session.guide.advance(judged.tokens))
        accepted = min(len(judged.outcome.path), len(tokens))
        self.accepted += accepted
        session.commit(Verdict(position, tuple(tokens), accepted, TokenKind.PLAIN, finish_reason=reason))
        self.drafter.commit(position, tuple(tokens))
        assert (reason is FinishReason.STOP) == over(self.text)
        return reason is not FinishReason.NONE


# --- with draft probabilities, by enumeration ------------------------------------------------------------------------


def drawn(both: Both, branches: Branches, *, cut: bool = False) -> None:
    """The drafter's own draws, every way there is."""
    drafter = both.drafter
    while (request := drafter.next_request()) is not None:
        path = tuple(request.tokens[START:])
        ready, live = draft_sampling._mask_by_grammar(
            request, rows("draft", [path]), [request.tokens[request.committed :]]
        )
        if not live:
            drafter.add_guess(request.chain(done=True), 0)
            continue
        probs = sampling.candidates(ready, request.params).probs[0]
        drawn_from = sampling.quantise(probs, torch.arange(VOCAB), VOCAB)
        draft = request.chain([branches.token(drawn_from)], [drawn_from])
        if cut:
            cursor = GrammarCursor(GRAMMARS.compile(request.params), START)
            draft = replace(request, grammar_cursor=cursor).allowed(draft)
        drafter.add_guess(draft, 0)


def texts(mode: Verification, *, blind: bool = False, cut: bool = False, **more: Any) -> dict[Path, float]:
    params = SamplingParams(seed=1, max_tokens=LENGTH, verification=mode, grammar=Grammar(regex=REGEX), **more)

    def play(branches: Branches) -> Path:
        both = Both(params, blind=blind)
        ended = False
        while not ended:
            drawn(both, branches, cut=cut)
            both.guess()
            ended = both.step(branches)
        return both.text

    joint: dict[Path, float] = {}
    for text, weight in every_way(play):
        joint[text] = joint.get(text, 0.0) + weight
    return joint


@pytest.mark.parametrize("blind", [False, True], ids=["masked guesses", "guesses that know nothing"])
@pytest.mark.parametrize("mode", DRAWN)
def test_the_text_is_exactly_the_masked_targets(mode: Verification, blind: bool) -> None:
    assert distance(texts(mode, blind=blind), wanted()) < EXACT


def test_who_ignores_the_end_goes_on_while_the_grammar_does() -> None:
    assert distance(texts(Verification.BLOCK, ignore_eos=True), wanted(ignore_eos=True)) < EXACT


@pytest.mark.parametrize("mode", DRAWN)
def test_the_checker_sees_what_a_judge_without_masks_does(mode: Verification, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first token against the grammar fails the session; so let it judge what no grammar forbids, too."""
    monkeypatch.setattr(
        sampling, "restrict", lambda logits, allowed: logits.masked_fill(torch.from_numpy(~allowed), -1.0)
    )
    monkeypatch.setattr(Both, "step", _forgiving(Both.step))
    assert distance(texts(mode), wanted()) > 0.01


def _forgiving(step):
    def forgive(both: Both, chance: RandomSource) -> bool:
        try:
            return step(both, chance)
        except InvalidRequest:
            return True

    return forgive


@pytest.mark.parametrize("mode", DRAWN)
def test_the_checker_sees_a_drafter_that_holds_back_what_it_has_drawn(mode: Verification) -> None:
    assert distance(texts(mode, blind=True, cut=True), wanted()) > 0.01


# --- with shared noise, by many seeds --------------------------------------------------------------------------------

SEEDS = 1500


def shared(both: Both) -> None:
    """Guesses as a model drafter makes them, a level at a time."""
    drafter = both.drafter
    while (request := drafter.next_request()) is not None:
        if request.branches == 1:
            path = tuple(request.tokens[START:])
            found = draft_sampling.next_token(request, rows("draft", [path]), request.tokens, 4)
            drafter.add_guess(request.chain(done=True) if found is None else request.chain([found[0]]), 0)
            continue
        builder = TreeBuilder(request)
        places = builder.expandable_nodes()
        paths = [builder.path(place) for place in places]
        said = rows("draft", [(*request.tokens[START : request.committed], *path) for path in paths])
        for place, choices in zip(places, draft_sampling.token_choices(request, said, paths), strict=True):
            builder.add_choices(place, choices)
        added = [builder.add() for _ in range(builder.level_budget)]
        drafter.add_guess(builder.guess(done=added[0] is None), 0)


def text_of(seed: int, *, plain: bool = False, blind: bool = False, branches: int = 1, **more: Any) -> tuple[Path, int]:
    """What one session says, and how many guesses it took for that."""
    params = SamplingParams(seed=seed, max_tokens=LENGTH, grammar=Grammar(regex=REGEX), **more)
    both = Both(params, blind=blind, branches=branches)
    ended = False
    while not ended:
        if not plain:
            shared(both)
            both.guess()
        ended = both.step(SeededNoise(seed))
    return both.text, both.accepted


def test_coupled_text_follows_the_masked_target() -> None:
    seen = Counter(text_of(seed, plain=True)[0] for seed in range(SEEDS))
    assert chi_square(seen, wanted(), SEEDS) > LOWEST_P


def test_the_seeds_would_tell_another_distribution() -> None:
    seen = Counter(text_of(seed, plain=True, temperature=1.3)[0] for seed in range(SEEDS))
    assert chi_square(seen, wanted(), SEEDS) < 1e-6


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}], ids=str)
def test_guesses_never_show(params: dict[str, Any], branches: int) -> None:
    masked = knowing_nothing = 0
    for seed in range(150 if params.get("temperature") != 0.0 else 1):
        plain, _ = text_of(seed, plain=True, **params)
        text, accepted = text_of(seed, branches=branches, **params)
        assert text == plain
        masked += accepted
        text, accepted = text_of(seed, blind=True, branches=branches, **params)
        assert text == plain
        knowing_nothing += accepted
    if branches == 1 and params.get("temperature") != 0.0:  # else there are too few ids for one not to be guessed
        assert masked > 1.1 * knowing_nothing > 0, "who knows the grammar guesses better"
