"""The model drafter against the model itself: chains, trees, and what is kept of them."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoTokenizer, LlamaForCausalLM

from drafter.calibration import Calibration
from drafter.interface import DraftRequest
from drafter.methods.model import ModelDrafter, read_vocabulary
from drafter.methods.registry import make
from drafter.session import DraftOpening, DraftSession
from drafter.tree_builder import TreeBuilder
from outrider.engine.loading.loader import LoadedModel, load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.errors import StartupError
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, DraftSteering, Guess
from outrider.settings.drafter import DrafterSettings
from outrider.speculation.exponential_race import shared_choices
from outrider.speculation.sampling import History, adjust
from tests.conftest import Models

PROMPT = [*range(40, 70)]
VOCAB = 257
MODES = [
    {"temperature": 0.0},
    {"temperature": 2.0, "seed": 3},
    {"temperature": 0.9, "repetition_penalty": 0.1, "seed": 3},
]


@pytest.fixture(scope="module", params=["auto", "transformers"])
def loaded(models: Models, request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(str(models.draft), EngineOptions(device="cpu", engine=request.param, kv_tokens=4096))


@pytest.fixture(scope="module")
def plain(models: Models) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(models.draft, dtype=torch.float32, attn_implementation="eager").eval()


def drafter_of(loaded: LoadedModel) -> ModelDrafter:
    return ModelDrafter(loaded, 24)


def session_of(tokens: list[int], gamma: int, branches: int, **params) -> DraftSession:
    params = SamplingParams(max_tokens=500, **({"seed": 1} | params))
    opening = DraftOpening(
        "s", 0, tuple(tokens), len(PROMPT), params, VOCAB, DraftSteering(gamma=gamma, branches=branches)
    )
    return DraftSession(opening)


def grown(drafter: ModelDrafter, session: DraftSession) -> int:
    """Draft until it is sent; how many steps that took."""
    steps = 0
    while (request := session.next_request()) is not None:
        (draft,) = drafter.draft([request])
        session.add_guess(draft, 0)
        steps += 1
        assert steps < 200
    return steps


def paths(session: DraftSession) -> set[tuple[int, ...]]:
    return set(session.open_guesses.guess.paths[1:])


def by_hand(plain: LlamaForCausalLM, request: DraftRequest) -> Guess:
    """The next level, from the model's own answer to every path of the tree."""
    builder = TreeBuilder(request)
    for place in range(-1, len(request.open_guess.tokens)):
        tokens = [*request.tokens[: request.committed], *builder.path(place)]
        with torch.inference_mode():
            logits = plain(torch.tensor([tokens])).logits[0, -1:]
        logits = adjust(logits, request.params, History(tokens, request.prompt_length, VOCAB, logits.device), [()])
        builder.add_choices(place, shared_choices(logits, request.params, [len(tokens)], request.branches)[0])
    added = [builder.add() for _ in range(builder.level_budget)]
    return builder.guess(done=added[0] is None)


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_the_model_does_not_know_is_read_as_an_end_token(
    loaded: LoadedModel, branches: int, mode: dict[str, Any]
) -> None:
    """The target's vocabulary may have more tokens: all chats of a tuned target have some that its base lacks."""
    drafter, larger = drafter_of(loaded), VOCAB + 8
    (end,) = loaded.engine.info.eos_token_ids
    guesses = []
    for session, token in (("known", end), ("unknown", VOCAB), ("last", larger - 1)):
        request = session_of([*PROMPT, token, *PROMPT], 2, branches, **mode).next_request()
        assert request is not None
        request = replace(request, session=session, vocab_size=larger)
        guesses.append(drafter.draft([request])[0])
        drafter.forget(session)
    assert guesses[0].tokens
    if "repetition_penalty" in mode:  # which counts what the text has
        assert all(guess.tokens and max(guess.tokens) < VOCAB for guess in guesses)
    else:
        assert [guess.tokens for guess in guesses] == [guesses[0].tokens] * 3


@pytest.mark.parametrize("branches", [1, 2])
def test_a_bias_on_an_id_that_the_model_does_not_know_changes_no_guess(loaded: LoadedModel, branches: int) -> None:
    drafter, larger = drafter_of(loaded), VOCAB + 8
    guesses = []
    for name, bias in (("known", {}), ("unknown", {VOCAB: 100.0})):
        request = session_of(PROMPT, 2, branches, logit_bias={70: 1.0, **bias}).next_request()
        assert request is not None
        guesses.append(drafter.draft([replace(request, session=name, vocab_size=larger)])[0])
        drafter.forget(name)
    assert guesses[0].tokens
    assert guesses[0].tokens == guesses[1].tokens


@pytest.mark.parametrize("branches", [1, 2])
def test_a_guess_that_the_model_does_not_know_is_followed_by_others(loaded: LoadedModel, branches: int) -> None:
    """A grammar may allow nothing else."""
    drafter, larger = drafter_of(loaded), VOCAB + 8
    session = session_of(PROMPT, 3, branches)
    session.open_guesses.extend(Guess(len(PROMPT), 0, 0, (VOCAB + 1,), parents=(-1,)), ())
    request = session.next_request()
    assert request is not None
    (guess,) = drafter.draft([replace(request, vocab_size=larger)])
    drafter.forget(request.session)
    assert len(guess.tokens) > 1


def test_a_session_that_is_forgotten_leaves_no_nodes_to_compute(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails has chosen them, and draws from none."""
    drafter, session = drafter_of(loaded), session_of(PROMPT, 3, 2)
    request = session.next_request()
    assert request is not None
    session.add_guess(drafter.draft([request])[0], 0)

    def fail(_: object) -> object:
        raise RuntimeError("out of memory")

    request = session.next_request()
    assert request is not None
    with monkeypatch.context() as patch:
        patch.setattr(loaded.engine, "extend", fail)
        with pytest.raises(RuntimeError):
            drafter.draft([request])
    assert drafter._computed_nodes[session.key], "or there is nothing to forget"
    drafter.forget(session.key)
    assert drafter._computed_nodes == {}


@pytest.mark.parametrize("params", MODES, ids=str)
def test_a_tree_is_what_the_model_would_say_along_every_branch(loaded: LoadedModel, plain, params: dict) -> None:
    # Of one token, so that penalties bear on the tree's own tokens.
    drafter, session = drafter_of(loaded), session_of([65] * len(PROMPT), 4, 3, **params)
    for n in range(3):
        steps = 0
        while (request := session.next_request()) is not None:
            before = deepcopy(request.calibration)  # it counts what is drafted
            wanted = by_hand(plain, replace(request, calibration=before))
            assert drafter.draft([request]) == [wanted]
            session.add_guess(wanted, 0)
            steps += 1
        assert n or steps == 4, "a level a step"
        assert len(paths(session)) == 12
        session.commit(session.open_guesses.guess.position, (*max(paths(session), key=len)[:n], 7))
    drafter.forget(session.key)


class Deaf(Calibration):
    """Believes the drafter, whatever happens."""

    def score(self, rank: int, logprob: float) -> float:
        return logprob


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
        fresh.open_guesses.guess, fresh.open_guesses._ids = session.open_guesses.guess, list(session.open_guesses._ids)
        fresh._exhausted = False
        session._calibration = fresh._calibration = Deaf()
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
    while asked := [(session, request) for session in sessions if (request := session.next_request()) is not None]:
        for (session, _), draft in zip(asked, drafter.draft([request for _, request in asked]), strict=True):
            session.add_guess(draft, 0)
    assert {1: paths(sessions[0]), 2: paths(sessions[1])} == alone
    for session in sessions:
        drafter.forget(session.key)


def test_a_long_prompt_comes_before_the_tree(loaded: LoadedModel) -> None:
    tokens = [(7 * i) % 250 for i in range(1200)]
    params = SamplingParams(temperature=0.0)
    request = DraftRequest("long", tokens, len(tokens), 5, 2, params, VOCAB, branches=2, budget=4, depth=2)
    drafter = drafter_of(loaded)
    drafts = [drafter.draft([request])[0] for _ in range(3)]
    assert drafts[:2] == [request.chain()] * 2
    assert len(drafts[2].tokens) == 2
    drafter.forget("long")


@pytest.mark.parametrize("branches", [1, 2])
def test_a_text_larger_than_the_cache_drives_out_no_other(models: Models, branches: int) -> None:
    """Nor is its beginning computed, again and again, until the cache is full."""
    loaded = load_model(str(models.draft), EngineOptions(device="cpu", kv_tokens=256))
    drafter, session = drafter_of(loaded), session_of(PROMPT, 2, branches)
    grown(drafter, session)
    held, request = loaded.engine.length(session.key), session_of([*PROMPT] * 9, 2, branches).next_request()
    assert request is not None
    assert held >= len(PROMPT)
    for large in (request, replace(request, tokens=request.tokens[:256], committed=256)):
        assert drafter.draft([large]) == [large.chain(done=True)]
        assert loaded.engine.length(large.session) == 0
        assert loaded.engine.length(session.key) == held


def test_a_full_cache_keeps_the_sessions_that_it_holds_and_is_told(models: Models) -> None:
    """To drive out each other's would compute whole texts again and again, in the steps of all."""
    loaded = load_model(str(models.draft), EngineOptions(device="cpu", kv_tokens=256))
    drafter, sessions = drafter_of(loaded), [session_of([number, *PROMPT] * 3, 2, 1) for number in range(3)]
    for step in range(16):
        if step == 8:
            drafter.forget(sessions.pop(0).key)
        requests = [request for session in sessions if (request := session.next_request()) is not None]
        with capture_logs() as logs:
            guesses = drafter.draft(requests)
        drafted = [bool(request.new_tokens(guess)) for request, guess in zip(requests, guesses, strict=True)]
        assert drafted == ([True, True, False] if step < 8 else [True, True])
        assert len(logs) == (step == 0), "not a line for each step"
        for session, guess in zip(sessions, guesses, strict=True):
            session.add_guess(guess, 1)
            session.commit(len(session.committed), (1,))


def test_a_place_that_is_full_ends_the_draft(loaded: LoadedModel) -> None:
    drafter = drafter_of(loaded)
    params = SamplingParams(temperature=1.0, top_k=1, seed=1)
    request = DraftRequest("s", PROMPT, len(PROMPT), 5, 1, params, VOCAB, branches=3, budget=3, depth=1)
    draft = drafter.draft([request])[0]
    assert len(draft.tokens) == 1, "top-k leaves one candidate"
    again = replace(request, open_guess=draft, budget=2)
    assert drafter.draft([again])[0] == again.chain(done=True)
    drafter.forget("s")


# --- a reduced output vocabulary -------------------------------------------------------------------------------------

SOME = [id_ for id_ in range(VOCAB) if id_ % 3 != 1]


@pytest.fixture(scope="module")
def tied(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output embeddings are its input embeddings."""
    folder = tmp_path_factory.mktemp("tied")
    model = LlamaForCausalLM.from_pretrained(models.draft, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.model.embed_tokens.weight.data = model.lm_head.weight.data
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(models.draft).save_pretrained(folder)
    return folder


@pytest.fixture(params=["draft", "tied"])
def folder(models: Models, tied: Path, request: pytest.FixtureRequest) -> Path:
    return tied if request.param == "tied" else models.draft


def reduced(folder: Path, engine: str, tmp_path: Path, ids: object = SOME) -> ModelDrafter:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(ids))
    settings = DrafterSettings(
        kind="model", model=str(folder), device="cpu", engine=engine, kv_tokens=4096, draft_vocabulary=str(file)
    )
    drafter = make(settings, lambda _: None)
    assert isinstance(drafter, ModelDrafter)
    return drafter


def allowed(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The whole model's logits, those of other ids struck out."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1:]
    struck = torch.full_like(logits, float("-inf"))
    struck[:, SOME] = logits[:, SOME]
    return struck


@pytest.mark.parametrize("engine", ["auto", "transformers"])
@pytest.mark.parametrize("params", [*MODES, {"temperature": 1.0, "seed": 5, "logit_bias": {5: 9.0, 4: 9.0}}], ids=str)
def test_only_what_is_left_is_drafted_and_as_the_whole_model_would(
    folder: Path, tmp_path: Path, engine: str, params: dict
) -> None:
    drafter = reduced(folder, engine, tmp_path)
    tokens = list(PROMPT)
    for _ in range(6):
        given = SamplingParams(**params)
        (draft,) = drafter.draft([DraftRequest("s", tokens, len(tokens), len(PROMPT), 4, given, VOCAB)])
        logits = allowed(folder, tokens)
        logits = adjust(logits, given, History(tokens, len(PROMPT), VOCAB, logits.device), [()])
        assert draft.tokens[0] == shared_choices(logits, given, [len(tokens)], 1)[0][0][0]
        assert draft.tokens[0] in SOME
        tokens += draft.tokens


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_what_is_drawn_from_is_told_in_the_targets_ids(folder: Path, tmp_path: Path, engine: str) -> None:
    drafter = reduced(folder, engine, tmp_path, {"ids": SOME})
    params = SamplingParams(temperature=1.0, seed=5, verification=Verification.BLOCK)
    (draft,) = drafter.draft([DraftRequest("s", PROMPT, len(PROMPT), len(PROMPT), 4, params, VOCAB)])
    (distribution,) = draft.draft_probs
    assert draft.tokens[0] in distribution.ids
    distribution.check("probs", VOCAB)
    probs = torch.softmax(allowed(folder, PROMPT)[0].double(), dim=-1)
    ids = sorted(probs.topk(24).indices.tolist())
    assert set(distribution.ids) <= set(ids)
    found = torch.tensor(distribution.weights) / WHOLE
    wanted = probs[list(distribution.ids)] / probs[ids].sum()
    assert torch.allclose(found, wanted.float(), atol=1e-3)


def test_a_reduced_model_is_another_model_of_the_same_vocabulary(models: Models, tmp_path: Path) -> None:
    whole = load_model(str(models.draft), EngineOptions(device="cpu", kv_tokens=4096))
    some, others = reduced(models.draft, "auto", tmp_path), reduced(models.draft, "auto", tmp_path, SOME[:-1])
    infos = [whole.engine.info, some.info, others.info]
    assert len({info.fingerprint for info in infos}) == 3
    assert len({(info.vocab_size, info.vocabulary_digest) for info in infos}) == 1


@pytest.mark.parametrize("ids", [[], [-1, 2], [1, VOCAB], ["a"], {"tokens": [1]}, 7, [True, 2]])
def test_ids_that_cannot_be_are_refused(models: Models, tmp_path: Path, ids: object) -> None:
    with pytest.raises(StartupError) as refused:
        reduced(models.draft, "auto", tmp_path, ids)
    assert refused.value.field == "draft_vocabulary"


def test_a_vocabulary_that_is_not_there_is_refused(models: Models) -> None:
    with pytest.raises(StartupError, match=r"nowhere\.json"):
        read_vocabulary("nowhere.json")


@pytest.mark.parametrize("kind", ["model", "translate"])
def test_a_missing_model_is_asked_for_in_the_form_of_each_command(kind: str) -> None:
    with pytest.raises(StartupError, match=f"kind {kind} needs --model; of `up`, --drafter {kind}:MODEL"):
        make(DrafterSettings(kind=kind), print)
