"""EAGLE: what it drafts is what it was trained to answer, row for row, whatever is cached."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.hidden_states import received
from drafter.interface import DraftRequest
from drafter.methods import kernel_chains
from drafter.methods.eagle import EagleDrafter, engine_for
from outrider.engine.checks.reference import round_to_int4, round_to_int8
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Guess
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts.eagle import Eagle, EagleShape
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead

VOCAB, HIDDEN, DRAFTED = 60, 32, 40
PROMPT = [3, 17, 8, 55, 21, 9, 30, 4]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def eagle(target: LlamaForCausalLM) -> Eagle:
    torch.manual_seed(4)
    ids = torch.randperm(VOCAB)[:DRAFTED].sort().values
    made = Eagle(EagleShape.like(target), ids, EmbeddingsAndHead.of(target)).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.3)
    return made


def drafter_of(eagle: Eagle, kv_tokens: int, **options: str) -> EagleDrafter:
    eagle = copy.deepcopy(eagle)  # its engine takes the weights
    settings = DrafterSettings(
        **{"kind": "eagle", "dtype": "float32", "device": "cpu", "kv_tokens": kv_tokens} | options
    )
    return EagleDrafter(eagle, engine_for(eagle, settings, lambda _: None), ModelInfo("eagle", "e"), 8)


@pytest.fixture
def drafter(eagle: Eagle) -> EagleDrafter:
    return drafter_of(eagle, 512)


def states_of(target: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """The target's final hidden states after each token.  # [tokens, hidden]"""
    with torch.no_grad():
        states = target.model(torch.tensor([tokens])).last_hidden_state[0]
    return states.half().float()  # as they cross the wire


def sent(states: torch.Tensor, first: int, last: int) -> HiddenStates:
    rows = states[first:last].numpy().astype("<f2")
    return HiddenStates(first, rows.shape[1], np.ascontiguousarray(rows).tobytes())


def ask_for(
    tokens: list[int], max_new_tokens: int, *features: HiddenStates, guesses: list[int] | None = None, **more: object
) -> DraftRequest:
    params = more.pop("params", SamplingParams(temperature=0.0, seed=1))
    return DraftRequest(
        "s",
        tokens + (guesses or []),
        len(tokens),
        len(PROMPT),
        max_new_tokens,
        params,
        VOCAB,
        open_guess=Guess(len(tokens), 0, 0, tuple(guesses or ())),
        hidden_states=features,
        **more,
    )  # type: ignore[arg-type]


def foretold(eagle: Eagle, states: torch.Tensor, tokens: list[int], length: int) -> list[int]:
    """By the definition: all rows from the first on, each next one beside the last answer."""
    states = states[: len(tokens) - 1]
    tokens, drafted = list(tokens), []
    with torch.no_grad():
        for _ in range(length):
            inputs = eagle.inputs(states[None], torch.tensor([tokens[1:]]))
            answer = eagle.body.model(inputs_embeds=inputs).last_hidden_state[0, -1:]
            drafted.append(int(eagle.ids[eagle.head(answer)[0].argmax()]))
            tokens.append(drafted[-1])
            states = torch.cat([states, answer])
    return drafted


def test_a_chain_is_what_the_layer_foretells(target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter) -> None:
    states = states_of(target, PROMPT)
    (draft,) = drafter.draft([ask_for(PROMPT, 5, sent(states, 0, len(PROMPT) - 1))])
    assert list(draft.tokens) == foretold(eagle, states, PROMPT, 5)


def test_commits_replace_answers_by_states(target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter) -> None:
    """Right and wrong guesses, features in pieces and overlapping: each draft is as if nothing had been cached."""
    tokens = list(PROMPT)
    told = 0
    for new in ([5], [9, 12, 40], [1], [2, 2]):
        states = states_of(target, tokens)
        pieces = [sent(states, max(0, told - 1), len(tokens) - 1)]
        told = len(tokens) - 1
        (draft,) = drafter.draft([ask_for(tokens, 3, *pieces)])
        assert list(draft.tokens) == foretold(eagle, states, tokens, 3)
        tokens += new


def test_earlier_states_make_the_draft_that_of_the_whole_context(
    target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter
) -> None:
    """Drafts from the end of the context, then from all of it once the earlier states have come."""
    states = states_of(target, PROMPT)
    (draft,) = drafter.draft([ask_for(PROMPT, 5, sent(states, 4, len(PROMPT) - 1))])
    assert list(draft.tokens) == foretold(eagle, states[4:], PROMPT[4:], 5) != foretold(eagle, states, PROMPT, 5)
    tokens = [*PROMPT, 5, 9]
    states = states_of(target, tokens)
    pieces = [(0, 3), (3, 4), (4, len(PROMPT) - 1), (len(PROMPT) - 1, len(tokens) - 1)]
    (draft,) = drafter.draft([ask_for(tokens, 5, *(sent(states, *piece) for piece in pieces))])
    assert list(draft.tokens) == foretold(eagle, states, tokens, 5)


def test_more_of_an_open_chain(target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter) -> None:
    states = states_of(target, PROMPT)
    wanted = foretold(eagle, states, PROMPT, 6)
    features = sent(states, 0, len(PROMPT) - 1)
    first = drafter.draft([ask_for(PROMPT, 2, features)])[0].tokens
    then = drafter.draft([ask_for(PROMPT, 4, guesses=list(first))])[0].tokens
    assert list(then) == wanted


def test_commits_whose_states_are_still_on_their_way(
    target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter
) -> None:
    states = states_of(target, PROMPT)
    wanted = foretold(eagle, states, PROMPT, 5)
    drafter.draft([ask_for(PROMPT, 4, sent(states, 0, len(PROMPT) - 1))])
    committed = PROMPT + wanted[:2]
    (draft,) = drafter.draft([ask_for(committed, 3)])
    assert list(draft.tokens) == wanted[2:]


def test_more_states_than_one_pass_takes(
    target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come where the texts of another drafter were used for long. The other sessions draft between two passes."""
    monkeypatch.setattr(received, "PASS_TOKENS", 3)
    states = states_of(target, PROMPT)
    (guess,) = drafter.draft([ask_for(PROMPT, 4, sent(states, 0, len(PROMPT) - 1))])
    passes = 1
    while not guess.tokens:
        assert not guess.done, "it goes on at once"
        (guess,) = drafter.draft([ask_for(PROMPT, 4)])
        passes += 1
    assert passes == math.ceil((len(PROMPT) - 1) / 3)
    assert list(guess.tokens) == foretold(eagle, states, PROMPT, 4)


@pytest.mark.parametrize("branches", [1, 3])
def test_after_a_rest_it_waits_for_states(
    target: LlamaForCausalLM, drafter: EagleDrafter, branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that were committed without states would take a pass each, for a guess from the wrong state."""
    states, further = states_of(target, PROMPT), [*PROMPT, *[5] * 40]
    drafter.draft([ask_for(PROMPT, 4, sent(states, 0, len(PROMPT) - 1))])
    passes: list[object] = []
    monkeypatch.setattr(drafter, "_compute", lambda batch: passes.append(batch) or {})
    (guess,) = drafter.draft([replace(ask_for(further, 4), branches=branches)])
    assert (guess.tokens, guess.done, passes) == ((), True, [])


def test_rare_tokens_take_turns_in_their_places(
    target: LlamaForCausalLM, eagle: Eagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_chains, "_PLACES", 8)
    drafter = drafter_of(eagle, 2048)
    texts = [[(first + 7 * i) % VOCAB for i in range(8)] for first in range(VOCAB)]
    for number, text in enumerate(texts):
        states = states_of(target, text)
        request = replace(ask_for(text, 3, sent(states, 0, len(text) - 1)), session=str(number))
        (guess,) = drafter.draft([request])
        assert list(guess.tokens) == foretold(eagle, states, text, 3)
        drafter.forget(str(number))


def test_a_rare_token_is_not_displaced_by_another_of_its_call(
    target: LlamaForCausalLM, eagle: Eagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess after the wrong token's part would be worse, and so would all that follow what it left in the cache."""
    monkeypatch.setattr(kernel_chains, "_PLACES", 2)
    drafter = drafter_of(eagle, 2048)
    rare = [token for token in range(VOCAB) if token not in eagle.ids.tolist()][:6]
    for known, new in permutations(rare, 2):
        text = [PROMPT[0], known, new]
        states = states_of(target, text)
        request = replace(ask_for(text, 3, sent(states, 0, len(text) - 1)), session=f"{known} {new}")
        (guess,) = drafter.draft([request])
        assert list(guess.tokens) == foretold(eagle, states, text, 3)
        drafter.forget(request.session)


@pytest.mark.parametrize("others", [0, 1])
def test_a_chain_grows_no_deeper_than_the_tree_may_be(
    target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter, others: int
) -> None:
    """An eager session's tree may be that deep when `blend` asks for a chain beside a proposal."""
    states = states_of(target, PROMPT)
    first = ask_for(PROMPT, 3, sent(states, 0, len(PROMPT) - 1))
    neighbours = [replace(first, session="neighbour")] * others
    chain = list(drafter.draft([first, *neighbours])[0].tokens)
    full = ask_for(PROMPT, 2, guesses=chain, depth=3)
    guess, *_ = drafter.draft([full, *neighbours])
    assert (list(guess.tokens), guess.done) == (chain, True)
    partly = ask_for(PROMPT, 2, guesses=chain[:2], depth=3)
    guess, *_ = drafter.draft([partly, *neighbours])
    assert (list(guess.tokens), guess.done) == (chain, True)


def test_without_the_beginning_of_the_prompt(target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter) -> None:
    """States of a shared prefix are not sent: what lies before the first one does not count."""
    states = states_of(target, PROMPT)
    (draft,) = drafter.draft([ask_for(PROMPT, 3, sent(states, 4, len(PROMPT) - 1))])
    assert list(draft.tokens) == foretold(eagle, states[4:], PROMPT[4:], 3)


def test_of_a_long_prompt_the_newest_positions_are_read(
    target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter
) -> None:
    """The others take time and make no guess better."""
    window, tokens = 16, [token * step % VOCAB for step in range(1, 13) for token in PROMPT]
    assert len(tokens) > window + 20
    states, first = states_of(target, tokens), len(tokens) - 1 - window
    (draft,) = drafter.draft([ask_for(tokens, 3, sent(states, 0, len(tokens) - 1))])
    assert list(draft.tokens) == foretold(eagle, states[first:], tokens[first:], 3)
    tokens, told = [*tokens, 5, 9], len(tokens) - 1
    states = states_of(target, tokens)
    (draft,) = drafter.draft([ask_for(tokens, 3, sent(states, told, len(tokens) - 1))])
    assert list(draft.tokens) == foretold(eagle, states[first:], tokens[first:], 3), "an answer is read whole"


def test_a_gap_in_the_states_begins_anew(target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter) -> None:
    states = states_of(target, PROMPT)
    drafter.draft([ask_for(PROMPT[:4], 2, sent(states, 0, 3))])
    (draft,) = drafter.draft([ask_for(PROMPT, 3, sent(states, 5, len(PROMPT) - 1))])
    assert list(draft.tokens) == foretold(eagle, states[5:], PROMPT[5:], 3)


def test_rotations_stay_exact_under_weights_in_bfloat16(eagle: Eagle) -> None:
    """Rounded frequencies would turn the keys of far positions by a wrong angle."""
    eagle = copy.deepcopy(eagle)
    frequencies = eagle.body.model.rotary_emb.inv_freq.clone()
    engine_for(eagle, DrafterSettings(kind="eagle", device="cpu", kv_tokens=512), lambda _: None)
    assert eagle.body.dtype == torch.bfloat16
    assert torch.equal(eagle.body.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_neighbours_do_not_change_a_draft(
    target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter, params: dict[str, float]
) -> None:
    """A session that drafts alone takes another way: its chain is computed in one call."""
    states = states_of(target, PROMPT)

    def request(session: str) -> DraftRequest:
        given = SamplingParams(**params, seed=1)  # type: ignore[arg-type]
        return replace(ask_for(PROMPT, 6, sent(states, 0, len(PROMPT) - 1), params=given), session=session)

    (alone,) = drafter.draft([request("alone")])
    assert len(alone.tokens) == 6
    assert drafter.draft([request("one"), request("other")]) == [alone, alone]


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
def test_what_was_computed_at_once_is_what_later_steps_continue_from(
    target: LlamaForCausalLM, eagle: Eagle, temperature: float
) -> None:
    """Commits of right and of wrong guesses, states that come late, and more of a chain that is open."""
    alone, together = drafter_of(eagle, 512), drafter_of(eagle, 512)
    params = SamplingParams(temperature=temperature, seed=3)
    tokens, told, drafted = list(PROMPT), 0, list[int]()
    for commit in (0, 2, -1, 3, 1, 0):
        tokens += drafted[:commit] if commit >= 0 else [9, 12]
        states = states_of(target, tokens)
        pieces = [] if commit == 3 else [sent(states, max(0, told - 1), len(tokens) - 1)]
        told = told if commit == 3 else len(tokens) - 1
        request = ask_for(tokens, 4, *pieces, params=params)
        (guess,) = alone.draft([request])
        assert [guess, guess] == together.draft([request, replace(request, session="other")])
        drafted = list(guess.tokens)
        more = ask_for(tokens, 2, params=params, guesses=drafted)
        (longer,) = alone.draft([more])
        assert [longer, longer] == together.draft([more, replace(more, session="other")])
        assert len(longer.tokens) == 6


def test_guesses_beyond_the_new_states_are_drafted_at_once_too(
    target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a session drafts ahead: states come while further guesses are open."""
    lengths: list[int] = []
    chain = drafter._engine.chain  # type: ignore[union-attr]

    def counted(*given: Any) -> Any:
        lengths.append(given[4])
        return chain(*given)

    monkeypatch.setattr(drafter._engine, "chain", counted)
    states, open_guesses = states_of(target, PROMPT), [5, 9, 12]
    request = ask_for(PROMPT, 4, sent(states, 0, len(PROMPT) - 1), guesses=open_guesses)
    (draft,) = drafter.draft([request])
    (steps,) = drafter_of(eagle, 512, engine="transformers").draft([request])
    assert draft.tokens == steps.tokens
    assert lengths == [4]


def test_four_bits_of_the_layer_and_eight_of_the_head_are_read(target: LlamaForCausalLM, eagle: Eagle) -> None:
    drafter, rounded = drafter_of(eagle, 512, dtype="auto"), copy.deepcopy(eagle)
    with torch.no_grad():
        for module in rounded.modules():
            if isinstance(module, torch.nn.Linear):
                rounding = round_to_int8 if module is rounded.body.lm_head else round_to_int4
                module.weight.copy_(rounding(module.weight))
    asked_for = drafter_of(eagle, 512, dtype="auto", quantization="int8")
    assert drafter._engine.weight_bytes < asked_for._engine.weight_bytes  # type: ignore[union-attr]
    as_rounded = as_trained = 0
    for seed in range(100):
        tokens = torch.randint(VOCAB, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
        states = states_of(target, tokens)
        (draft,) = drafter.draft([replace(ask_for(tokens, 1, sent(states, 0, 7)), session=str(seed))])
        as_rounded += list(draft.tokens) == foretold(rounded, states, tokens, 1)
        as_trained += list(draft.tokens) == foretold(eagle, states, tokens, 1)
    assert as_trained + 5 < as_rounded >= 85


def test_it_says_how_many_ids_have_an_embedding(drafter: EagleDrafter) -> None:
    assert drafter.vocab_limit == VOCAB


def test_nothing_without_states(drafter: EagleDrafter) -> None:
    assert drafter.draft([ask_for(PROMPT, 3)]) == [Guess(len(PROMPT), 0, 0, (), done=True)]


def test_a_trees_nodes_are_the_likeliest_of_chains(
    target: LlamaForCausalLM, eagle: Eagle, drafter: EagleDrafter
) -> None:
    states = states_of(target, PROMPT)
    features = sent(states, 0, len(PROMPT) - 1)
    (draft,) = drafter.draft([ask_for(PROMPT, 3, features, branches=2, budget=6, depth=3)])
    assert len(draft.tokens) == 6
    first = foretold(eagle, states, PROMPT, 1)[0]
    children: dict[int, list[int]] = {}
    for token, parent in zip(draft.tokens, draft.shape.parents, strict=True):
        children.setdefault(parent, []).append(token)
    assert children[-1][0] == first
    for parent, found in children.items():
        path, at = [], parent
        while at >= 0:
            path.append(draft.tokens[at])
            at = draft.shape.parents[at]
        replies = _follow(eagle, states, PROMPT, path[::-1])
        assert found[0] == replies, "the first child of a node is what a chain would go on with"


def _follow(eagle: Eagle, states: torch.Tensor, tokens: list[int], path: list[int]) -> int:
    states, tokens = states[: len(tokens) - 1], list(tokens)
    with torch.no_grad():
        for token in [*path, None]:
            inputs = eagle.inputs(states[None], torch.tensor([tokens[1:]]))
            answer = eagle.body.model(inputs_embeds=inputs).last_hidden_state[0, -1:]
            if token is None:
                break
            tokens.append(token)
            states = torch.cat([states, answer])
    return int(eagle.ids[eagle.head(answer)[0].argmax()])


def test_a_full_cache_gives_up_the_idle(target: LlamaForCausalLM, eagle: Eagle) -> None:
    drafter = drafter_of(eagle, 64)
    states = states_of(target, PROMPT)
    wanted = foretold(eagle, states, PROMPT, 2)
    for i in range(5):
        request = ask_for(PROMPT, 2, sent(states, 0, len(PROMPT) - 1))
        (draft,) = drafter.draft(
            [DraftRequest(**{name: getattr(request, name) for name in request.__slots__} | {"session": f"s{i}"})]
        )
        assert list(draft.tokens) == wanted
    drafter.forget("s4")


def test_weights_survive_the_folder(eagle: Eagle, target: LlamaForCausalLM, tmp_path: Path) -> None:
    again = Eagle.from_weights(asdict(eagle.shape), eagle.weights(), EmbeddingsAndHead.of(target))
    for (name, mine), (_, theirs) in zip(eagle.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(mine.to(torch.bfloat16), theirs.to(torch.bfloat16)), name
