"""The model drafter against the model itself: chains, trees, and what is kept of them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from drafter.drafters import Ask, Draft
from drafter.drafters.model import ModelDrafter
from drafter.growth import Growth
from drafter.session import Opening, Session
from outrider.drawing import shared_choices
from outrider.engine.load import EngineOptions, LoadedModel, load_model
from outrider.messages import SamplingParams, Steering
from outrider.sampling import History, adjust
from tests.conftest import Models

PROMPT = [*range(40, 70)]
VOCAB = 257
MODES = [
    {"temperature": 0.0},
    {"temperature": 2.0, "seed": 3},
    {"temperature": 0.9, "repetition_penalty": 8.0, "seed": 3},
]


@pytest.fixture(scope="module", params=["auto", "off"])
def loaded(models: Models, request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(str(models.draft), EngineOptions(device="cpu", compile=request.param, kv_tokens=4096))


@pytest.fixture(scope="module")
def plain(models: Models) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(models.draft, dtype=torch.float32, attn_implementation="eager").eval()


def drafter_of(loaded: LoadedModel) -> ModelDrafter:
    return ModelDrafter(loaded.engine, loaded.vocabulary, 24)


def session_of(tokens: list[int], gamma: int, branches: int, **params) -> Session:
    params = SamplingParams(max_tokens=500, **({"seed": 1} | params))
    opening = Opening("s", 0, tuple(tokens), len(PROMPT), params, VOCAB, Steering(gamma=gamma, branches=branches))
    return Session(opening)


def grown(drafter: ModelDrafter, session: Session) -> int:
    """Draft until it is sent; how many steps that took."""
    steps = 0
    while (ask := session.ask()) is not None:
        (draft,) = drafter.draft([ask])
        session.take(draft, 0)
        steps += 1
        assert steps < 200
    return steps


def paths(session: Session) -> set[tuple[int, ...]]:
    return {tuple(session._path(node)) for node in session._tree}


def by_hand(plain: LlamaForCausalLM, ask: Ask) -> Draft:
    """The next level, from the model's own answer to every path of the tree."""
    growth = Growth(ask)
    for place in range(-1, len(ask.open_tokens)):
        tokens = [*ask.tokens[: ask.committed], *growth.path(place)]
        with torch.inference_mode():
            logits = plain(torch.tensor([tokens])).logits[0, -1:]
        logits = adjust(logits, ask.params, History(tokens, ask.prompt_length, VOCAB, logits.device), [()])
        growth.offer(place, shared_choices(logits, ask.params, [len(tokens)], ask.branches)[0])
    added = [growth.add() for _ in range(growth.share)]
    return growth.draft(done=added[0] is None)


@pytest.mark.parametrize("params", MODES, ids=str)
def test_a_tree_is_what_the_model_would_say_along_every_branch(loaded: LoadedModel, plain, params: dict) -> None:
    drafter, session = drafter_of(loaded), session_of(PROMPT, 4, 3, **params)
    for n in range(3):
        steps = 0
        while (ask := session.ask()) is not None:
            (draft,) = drafter.draft([ask])
            assert draft == by_hand(plain, ask)
            session.take(draft, 0)
            steps += 1
        assert n or steps == 4, "a level a step"
        assert len(paths(session)) == 12
        session.commit(len(session._committed), (*max(paths(session), key=len)[:n], 7))
    drafter.forget(session.key)


@pytest.mark.parametrize("params", MODES, ids=str)
@pytest.mark.parametrize("branches", [1, 3])
def test_what_is_cached_never_shows(loaded: LoadedModel, params: dict, branches: int) -> None:
    """Commits that agree, commits that do not: the next tree is that of a drafter that saw all this for the first
    time."""
    drafter, session = drafter_of(loaded), session_of(PROMPT, 4, branches, **params)
    committed = list(PROMPT)
    for n in range(6):
        grown(drafter, session)
        longest = max(paths(session), key=len)
        new = (*longest[: n % 4], (n * 37) % 256)
        session.commit(len(committed), new)
        committed += new
        fresh = session_of(committed, 4, branches, **params)
        # What stayed open of the last tree is not what a fresh one would hold.
        fresh._tree, fresh._exhausted = list(session._tree), False
        grown(drafter, session)
        other = drafter_of(loaded)
        grown(other, fresh)
        other.forget(fresh.key)
        assert paths(session) == paths(fresh), n
        if branches > 1:
            assert loaded.engine.length(session.key) == len(committed)
    drafter.forget(session.key)
    assert loaded.engine.length(session.key) == 0


def test_trees_and_chains_share_a_step(loaded: LoadedModel) -> None:
    alone = {}
    for branches in (1, 2):
        drafter, session = drafter_of(loaded), session_of(PROMPT, 3, branches, temperature=0.0)
        grown(drafter, session)
        alone[branches] = paths(session)
        drafter.forget(session.key)
    drafter = drafter_of(loaded)
    sessions = [session_of(PROMPT, 3, branches, temperature=0.0) for branches in (1, 2)]
    while asked := [(session, ask) for session in sessions if (ask := session.ask()) is not None]:
        for (session, _), draft in zip(asked, drafter.draft([ask for _, ask in asked]), strict=True):
            session.take(draft, 0)
    assert {1: paths(sessions[0]), 2: paths(sessions[1])} == alone
    for session in sessions:
        drafter.forget(session.key)


def test_a_long_prompt_comes_before_the_tree(loaded: LoadedModel) -> None:
    tokens = [(7 * i) % 250 for i in range(1200)]
    params = SamplingParams(temperature=0.0)
    ask = Ask("long", tokens, len(tokens), 5, 2, params, VOCAB, branches=2, budget=4, depth=2)
    drafter = drafter_of(loaded)
    drafts = [drafter.draft([ask])[0] for _ in range(3)]
    assert drafts[:2] == [Draft(), Draft()]
    assert len(drafts[2].tokens) == 2
    drafter.forget("long")


def test_a_place_that_is_full_ends_the_draft(loaded: LoadedModel) -> None:
    drafter = drafter_of(loaded)
    params = SamplingParams(temperature=1.0, top_k=1, seed=1)
    ask = Ask("s", PROMPT, len(PROMPT), 5, 1, params, VOCAB, branches=3, budget=3, depth=1)
    draft = drafter.draft([ask])[0]
    assert len(draft.tokens) == 1, "top-k leaves one candidate"
    again = Ask("s", PROMPT, len(PROMPT), 5, 1, params, VOCAB, "", draft.tokens, (-1,), 3, 2, 1)
    assert drafter.draft([again])[0] == Draft(done=True)
    drafter.forget("s")
