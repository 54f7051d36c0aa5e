"""Published drafters behind the drafters' interface: what they draft is what their modules compute, row for row."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.hidden_states.declaration import StateDeclaration
from drafter.interface import Drafter, DraftRequest
from drafter.loop import DraftingLoop
from drafter.methods import published_blocks, registry
from drafter.methods.published import make
from drafter.published.dflash import PublishedDflash, PublishedDspark
from drafter.published.eagle3 import PublishedPeagle
from drafter.published.loading import PublishedCheckpoint
from drafter.published.module import PublishedModule
from drafter.published.rows import RowBatch, SessionRows
from drafter.session import DraftOpening
from outrider.hidden_states.projection import Projection
from outrider.hidden_states.rows import encode
from outrider.observability.metrics import DrafterMetrics
from outrider.protocol.errors import InvalidRequest, ModelMismatch, StartupError
from outrider.protocol.fleet import Role, WorkerInfo
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import Guess
from outrider.settings.drafter import DrafterSettings
from outrider.testing.toy_models import make_model
from outrider.train.artifacts.embeddings_and_head import read_embeddings_and_head
from tests.emulated_cuda import emulated_cuda
from tests.published import CASES, DRAFT_VOCAB, HIDDEN, VOCAB, target_hidden, weights_of, write

PROMPT = [3, 17, 8, 55, 21, 9, 30, 4]
MTP = ("mimo-mtp", "deepseek-mtp", "glm-mtp", "qwen-mtp", "mtp-speculators")
FINAL = ("eagle", "eagle-layers", *MTP)  # formats on final states
ROWS = (*FINAL, "eagle3", "eagle3-bare", "eagle3-modelopt", "eagle3.1-speculators")  # that guess token by token
# That guess several tokens at once.
BLOCKS = ("peagle", "dflash", "dflash-speculators", "dspark", "dspark-speculators", "dspark-gated", "dspark-rnn")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return targets by their width."""
    folder = tmp_path_factory.mktemp("models")
    return {width: str(make_model(folder / f"{width}", seed=7, hidden=width, layers=6)) for width in (64, HIDDEN)}


@pytest.fixture
def target(request: pytest.FixtureRequest, targets: dict[int, str]) -> str:
    """Return the target of the named checkpoint."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    return targets[64 if name == "eagle3-modelopt" else HIDDEN]


class Served:
    """A drafter, its module for comparison, and requests with states as they arrive."""

    def __init__(self, name: str, folder: Path, target: str, **settings: int) -> None:
        self.drafter = drafter_of(name, folder, target, **settings)
        self.module = PublishedCheckpoint.open(folder).load(read_embeddings_and_head(target, lambda _: None))
        self.states = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(5)).half().float()
        self._number = int(name not in FINAL)

    def sent(self, first: int, last: int) -> HiddenStates:
        return HiddenStates(first, HIDDEN, encode(self.states[first:last]).numpy().tobytes(), self._number)


def drafter_of(name: str, folder: Path, target: str, **settings: int) -> Drafter:
    chosen = DrafterSettings(kind="published", model=str(CASES[name](folder)), target=target, device="cpu", **settings)
    return make(chosen, lambda _: None)


def ask_for(tokens: list[int], max_new_tokens: int, *states: HiddenStates, **more: object) -> DraftRequest:
    given = {"params": SamplingParams(temperature=0.0, seed=1), "hidden_states": states} | more
    open_guess = Guess(len(tokens), 0, 0, ())
    return DraftRequest(
        "s", tokens, len(tokens), len(PROMPT), max_new_tokens, vocab_size=VOCAB, open_guess=open_guess, **given
    )  # type: ignore[arg-type]


@torch.no_grad()
def expected(module: PublishedModule, states: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> int:
    """Return the likeliest token after a path, by the definition: all rows from the first on, in a new cache."""
    if isinstance(module, (PublishedPeagle, PublishedDflash)):
        return expected_in_block(module, states, tokens, path)
    cache, states = module.new_cache(), states[: len(tokens) - 1]
    rows = RowBatch([SessionRows(cache, len(states))], states.device)
    output, following = module.step(rows, torch.tensor(tokens[1:]), states)
    for token in path:
        rows = RowBatch([SessionRows(cache, 1)], states.device)
        output, following = module.step(rows, torch.tensor([token]), following[-1:])
    return int(module.ids[module.logits(output)[-1].argmax()])


@torch.no_grad()
def expected_in_block(module: Any, states: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> int:
    """Return the same for a drafter that guesses several places at once, a whole prompt in one pass."""
    cache, states = module.new_cache(), states[: len(tokens) - 1]
    if isinstance(module, PublishedPeagle):
        masks, unknown = module.masks(len(path))
        rows = RowBatch([SessionRows(cache, len(states) + len(path))], states.device)
        output, _ = module.step(rows, torch.cat([torch.tensor(tokens[1:]), masks]), torch.cat([states, unknown]))
        return int(module.ids[module.logits(output)[-1].argmax()])
    module.commit(RowBatch([SessionRows(cache, len(states))], states.device), states)
    logits = module.logits(module.block([cache], [tokens[-1]])[0])[len(path)]
    if isinstance(module, PublishedDspark):
        (hidden,) = module.block([cache], [tokens[-1]])
        state = torch.zeros(1, module.markov_head.state_width)
        for place, token in enumerate([tokens[-1], *path]):
            state, bias = module.markov(state, torch.tensor([token]), hidden[place, None])
        logits = logits + bias[0]
    return int(module.ids[logits.argmax()])


def chain(module: PublishedModule, states: torch.Tensor, tokens: Sequence[int], length: int) -> list[int]:
    path: list[int] = []
    for _ in range(length):
        path.append(expected(module, states, tokens, path))
    return path


@pytest.mark.parametrize("name", [*ROWS, *BLOCKS])
def test_guesses_are_those_of_the_module_after_each_commit(
    name: str, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States come in pieces that overlap, and committed tokens replace right and wrong guesses."""
    monkeypatch.setattr(published_blocks, "_MIN_CONFIDENCE", 0.0)
    served = Served(name, tmp_path, target)
    drafter, module, states = served.drafter, served.module, served.states
    tokens, told = list(PROMPT), 0
    for new in ([5], [9, 12, 40], [1], [2, 2]):
        piece = served.sent(max(0, told - 1), len(tokens) - 1)
        told = len(tokens) - 1
        (draft,) = drafter.draft([ask_for(tokens, 4, piece)])
        assert list(draft.tokens) == chain(module, states, tokens, 4)
        tokens += new


@pytest.mark.parametrize("name", [*ROWS, *BLOCKS])
def test_a_trees_nodes_are_the_likeliest_after_their_paths(
    name: str, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_blocks, "_MIN_CONFIDENCE", 0.0)
    served = Served(name, tmp_path, target)
    drafter, module, states = served.drafter, served.module, served.states
    request = ask_for(PROMPT, 3, served.sent(0, len(PROMPT) - 1), branches=2, budget=7, depth=3)
    (tree,) = drafter.draft([request])
    assert len(tree.tokens) == 7
    assert max(map(len, tree.children.values())) == 2, "it branches"
    for node, children in tree.children.items():
        first, *_ = children
        assert first == expected(module, states, PROMPT, tree.paths[node + 1])
    (alone,) = drafter.draft([ask_for(PROMPT, 3)])
    assert list(alone.tokens) == chain(module, states, PROMPT, 3), "nothing of the tree is cached"


@pytest.mark.parametrize("name", [*ROWS, *BLOCKS])
def test_sessions_of_one_step_do_not_change_one_another(name: str, tmp_path: Path, target: str) -> None:
    served = Served(name, tmp_path, target)
    drafter = served.drafter
    asked = {
        "a": ask_for(PROMPT, 5, served.sent(0, len(PROMPT) - 1)),
        "b": ask_for(PROMPT[:4], 3, served.sent(0, 3), params=SamplingParams(temperature=1.0, seed=3)),
        "c": ask_for(PROMPT[:6], 3, served.sent(0, 5), branches=3, budget=9, depth=3),
    }
    requests = [replace(request, session=session) for session, request in asked.items()]
    alone = [drafter.draft([replace(request, session=request.session + "'")])[0] for request in requests]
    assert drafter.draft(requests) == alone


@pytest.mark.parametrize("name", BLOCKS)
def test_a_pass_that_failed_changes_no_later_guess(
    name: str, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(name, tmp_path, target)
    drafter: Any = served.drafter
    request = ask_for(PROMPT, 4, served.sent(0, len(PROMPT) - 1))
    (wanted,) = drafter.draft([replace(request, session="another")])
    guess = drafter._rows._module.guess

    def fail(rows: Any) -> None:
        guess(rows)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(drafter._rows._module, "guess", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        drafter.draft([request])
    monkeypatch.setattr(drafter._rows._module, "guess", guess)
    assert drafter.draft([request]) == [wanted]


@pytest.mark.parametrize("name", ["eagle", "mimo-mtp", "eagle3"])
def test_states_in_float8_are_read(name: str, tmp_path: Path, target: str) -> None:
    """A session numbers all states but the final ones as float16."""
    served = Served(name, tmp_path, target)
    rows = encode(served.states[: len(PROMPT) - 1], float8=True).numpy().tobytes()
    (draft,) = served.drafter.draft([ask_for(PROMPT, 2, HiddenStates(0, HIDDEN, rows, 2, float8=True))])
    assert len(draft.tokens) == 2
    foreign = int(name in FINAL)
    (draft,) = served.drafter.draft(
        [replace(ask_for(PROMPT, 2, replace(served.sent(0, 7), number=foreign)), session="t")]
    )
    assert not draft.tokens, "others are not"


SAMPLED = {"temperature": 1.0, "seed": 1}
MODES = {
    "greedy": {"temperature": 0.0, "seed": 1},
    "coupled": SAMPLED,
    "rejection": SAMPLED | {"verification": Verification.REJECTION},
    "block": SAMPLED | {"verification": Verification.BLOCK},
}


@pytest.mark.parametrize(("confidence", "free"), [(0.45, 2), (0.01, 0), (0.99, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_low_confidence_ends_a_guess_where_any_rule_is_exact(
    mode: str, confidence: float, free: int, tmp_path: Path, target: str
) -> None:
    """Under rejection and block verification, the length of a guess must not depend on what was drawn."""
    weights = weights_of(CASES["dspark"](tmp_path))
    weights["confidence_head.proj.weight"].zero_()
    weights["confidence_head.proj.bias"].fill_(math.log(confidence / (1 - confidence)))
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, config, weights)
    settings = DrafterSettings(kind="published", model=str(tmp_path), target=target, device="cpu")
    states = Served("dspark", tmp_path / "other", target).sent(0, len(PROMPT) - 1)
    (draft,) = make(settings, lambda _: None).draft([ask_for(PROMPT, 4, states, params=SamplingParams(**MODES[mode]))])
    assert len(draft.tokens) == (free if mode in ("greedy", "coupled") else 4)
    assert draft.done == (len(draft.tokens) < 4)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_adds_nothing_where_the_tree_is_as_deep_as_it_may_be(
    name: str, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_blocks, "_MIN_CONFIDENCE", 0.0)
    served = Served(name, tmp_path, target)
    (chain,) = served.drafter.draft([ask_for(PROMPT, 3, served.sent(0, len(PROMPT) - 1))])
    open_guess = Guess(len(PROMPT), 0, 0, chain.tokens)
    for depth, wanted in ((3, 3), (4, 4)):
        request = replace(ask_for(PROMPT, 2), tokens=[*PROMPT, *chain.tokens], open_guess=open_guess, depth=depth)
        (guess,) = served.drafter.draft([request])
        assert (len(guess.tokens), guess.done) == (wanted, True)


def test_a_block_goes_on_behind_committed_tokens_whose_states_are_on_their_way(tmp_path: Path, target: str) -> None:
    served = Served("dflash", tmp_path, target)
    (draft,) = served.drafter.draft([ask_for(PROMPT, 5, served.sent(0, len(PROMPT) - 1))])
    assert len(draft.tokens) == 5, "a block of six without its anchor"
    (rest,) = served.drafter.draft([ask_for([*PROMPT, 1, 2], 5)])
    assert rest.tokens == draft.tokens[2:]
    assert rest.done
    (none,) = served.drafter.draft([ask_for(PROMPT + [1] * 5, 5)])
    assert none == Guess(len(PROMPT) + 5, 0, 0, (), done=True)


@pytest.mark.parametrize("name", [name for name in (*ROWS, *BLOCKS) if name not in FINAL])
def test_the_projection_for_the_verifier_is_that_of_the_module(name: str, tmp_path: Path, target: str) -> None:
    served = Served(name, tmp_path, target)
    offered, needs = served.drafter.projection, served.module.needs
    assert offered.spec.layers == needs.layers_of(6)
    states = torch.randn(5, needs.states * needs.hidden, generator=torch.Generator().manual_seed(1))
    project = Projection(offered.data, needs.states, needs.hidden, torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(project(states), served.module.project(states))


def test_drafters_on_final_states_declare_no_projection(tmp_path: Path, target: str) -> None:
    assert drafter_of("eagle", tmp_path, target).projection is None


@pytest.mark.parametrize("kind", ["published", "suffix+published"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash"])
def test_a_drafter_declares_the_width_and_the_vocabulary_of_its_target(
    name: str, kind: str, tmp_path: Path, target: str
) -> None:
    """So that coordinators refuse it for other targets, whose states and ids it could not read."""
    checkpoint = CASES[name](tmp_path / "drafter")
    settings = DrafterSettings(kind=kind, model=str(checkpoint), target=target, device="cpu")
    made = registry.make(settings, lambda _: None)
    info = WorkerInfo("d", Role.DRAFTER, "here", made.info, hidden_states=True)
    assert StateDeclaration().declare(info, made, settings).state_width == target_hidden(checkpoint)
    assert (made.info.vocab_size, made.info.vocabulary_digest) == (VOCAB, "")


@pytest.mark.parametrize(("name", "number", "width"), [("eagle3", 0, HIDDEN), ("eagle3", 1, 64), ("eagle", 0, 64)])
def test_states_that_it_was_not_trained_on_are_not_read(
    name: str, number: int, width: int, tmp_path: Path, target: str
) -> None:
    """A coordinator of an earlier version sends final states; one of another target sends another width."""
    served = Served(name, tmp_path, target)
    other = HiddenStates(0, width, bytes(2 * width * (len(PROMPT) - 1)), number)
    (draft,) = served.drafter.draft([ask_for(PROMPT, 3, other)])
    assert not draft.tokens
    (draft,) = served.drafter.draft([ask_for(PROMPT, 3, served.sent(0, len(PROMPT) - 1))])
    assert list(draft.tokens) == chain(served.module, served.states, PROMPT, 3)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "verification": Verification.REJECTION}])
def test_drafted_ids_in_any_order(params: dict[str, Any], tmp_path: Path, target: str) -> None:
    """Sampling needs columns in the order of their ids; offsets may list them in another."""
    served = Served("eagle3", tmp_path / "sorted", target)
    weights = weights_of(tmp_path / "sorted")
    order = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(2))
    ids = (weights["d2t"] + torch.arange(DRAFT_VOCAB))[order]
    shuffled = weights | {"d2t": ids - torch.arange(DRAFT_VOCAB), "lm_head.weight": weights["lm_head.weight"][order]}
    write(tmp_path / "other", json.loads((tmp_path / "sorted" / "config.json").read_text()), shuffled)
    settings = DrafterSettings(kind="published", model=str(tmp_path / "other"), target=target, device="cpu")
    request = ask_for(PROMPT, 4, served.sent(0, len(PROMPT) - 1), params=SamplingParams(seed=1, **params))
    assert make(settings, lambda _: None).draft([request]) == served.drafter.draft([request])


@pytest.mark.parametrize("name", ["eagle", "peagle", "dflash"])
def test_a_full_cache_gives_up_the_idle(name: str, tmp_path: Path, target: str) -> None:
    served = Served(name, tmp_path, target, kv_tokens=64)
    drafter, module, states = served.drafter, served.module, served.states
    request = ask_for(PROMPT, 2, served.sent(0, len(PROMPT) - 1))
    wanted = chain(module, states, PROMPT, 2)
    for i in range(20):
        (draft,) = drafter.draft([replace(request, session=f"s{i}")])
        assert list(draft.tokens) == wanted
    drafter.forget("s19")


@pytest.mark.parametrize("name", ["eagle", "peagle", "dflash"])
def test_of_sessions_that_fill_the_cache_together_none_loses_its_context_again_and_again(
    name: str, tmp_path: Path, target: str
) -> None:
    """It was always the first one. It had as good as no context, and soon no guesses either."""
    drafter = drafter_of(name, tmp_path, target, kv_tokens=160)
    states = torch.randn(110, HIDDEN, generator=torch.Generator().manual_seed(5))
    sent, empty = 0, Counter[str]()
    for length in range(24, 108, 3):
        tokens = [token % VOCAB for token in range(length)]
        rows = encode(states[sent : length - 1]).numpy().tobytes()
        request = ask_for(tokens, 2, HiddenStates(sent, HIDDEN, rows, int(name not in FINAL)))
        requests = [replace(request, session=session) for session in "abcd"]
        empty.update(
            each.session for each, draft in zip(requests, drafter.draft(requests), strict=True) if not draft.tokens
        )
        sent = length - 1
    assert sum(empty.values()) >= 3, "the cache was full"
    assert max(empty.values()) <= 3, empty


@pytest.mark.parametrize("kind", ["published", "suffix+published"])
@pytest.mark.parametrize("name", ["eagle", "dflash"])
def test_a_session_whose_ids_have_no_embedding_is_refused(kind: str, name: str, tmp_path: Path, target: str) -> None:
    """On a GPU one such id ends the process, and with it the sessions of all coordinators."""
    settings = DrafterSettings(kind=kind, model=str(CASES[name](tmp_path)), target=target, device="cpu")
    loop = DraftingLoop(registry.make(settings, lambda _: None), 4, DrafterMetrics(name, kind))
    params = SamplingParams(seed=1, max_tokens=4)
    loop.open(DraftOpening("known", 1, tuple(PROMPT), len(PROMPT), params, vocab_size=VOCAB))
    with pytest.raises(InvalidRequest) as refused:
        loop.open(DraftOpening("unknown", 1, (*PROMPT, VOCAB), len(PROMPT), params, vocab_size=VOCAB + 1))
    assert (refused.value.field, refused.value.value) == ("open.vocab_size", str(VOCAB + 1))


def test_nothing_without_states(tmp_path: Path, target: str) -> None:
    drafter = drafter_of("eagle", tmp_path, target)
    assert drafter.draft([ask_for(PROMPT, 3)]) == [Guess(len(PROMPT), 0, 0, (), done=True)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers": 4}, "it needs 6, the target has number of layers 4"),
        ({"hidden": 64}, f"it needs {HIDDEN}, the target has hidden size 64"),
        ({"extra_tokens": ("<|more|>",)}, f"it needs {VOCAB}, the target has vocabulary size {VOCAB + 1}"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, given: dict[str, object], said: str) -> None:
    shape = {"seed": 7, "hidden": HIDDEN, "layers": 6} | given
    other = make_model(tmp_path / "target", **shape)  # type: ignore[arg-type]
    with pytest.raises(ModelMismatch, match="does not fit") as refused:
        drafter_of("mimo-mtp", tmp_path / "drafter", str(other))
    assert said in refused.value.message


def test_a_module_of_a_target_that_transformers_does_not_know(tmp_path: Path) -> None:
    drafter = drafter_of("mimo-mtp", tmp_path, str(tmp_path))
    states = HiddenStates(0, HIDDEN, bytes(2 * HIDDEN * (len(PROMPT) - 1)))
    (draft,) = drafter.draft([ask_for(PROMPT, 3, states)])
    assert len(draft.tokens) == 3


def test_a_folder_that_is_not_there(target: str) -> None:
    for name in ("", "/nowhere"):
        settings = DrafterSettings(kind="published", model=name, target=target, device="cpu")
        with pytest.raises(StartupError, match="there is no folder"):
            make(settings, lambda _: None)


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dspark-speculators"])
def test_everything_lies_on_the_drafters_device(name: str, tmp_path: Path, target: str) -> None:
    served = Served(name, tmp_path, target)
    settings = DrafterSettings(kind="published", model=str(tmp_path), target=target, device="cuda:0", dtype="float32")
    with emulated_cuda():
        drafter = make(settings, lambda _: None)
        for more in ({}, {"branches": 2, "budget": 6}, {"params": SamplingParams(**MODES["rejection"])}):
            request = replace(ask_for(PROMPT, 3, served.sent(0, len(PROMPT) - 1), **more), session=str(more))
            assert drafter.draft([request])[0].tokens
