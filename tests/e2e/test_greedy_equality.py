"""Greedy text is the target's own, token for token, whoever drafts and however far ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.testing.toy_models import make_model
from tests.cluster import SLOW, Cluster, Output, ask, generate_all
from tests.conftest import Models
from tests.e2e.prompts import mixed
from tests.models import likelier_end

PROMPTS = mixed(40)  # of every kind that it has
MAX_TOKENS = 128
DRAFTERS = ("model", "ngram")
GAMMAS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def ending(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a target whose greedy texts come to an end token, mostly within a dozen tokens, and its near copy."""
    folder = tmp_path_factory.mktemp("ending")
    target = likelier_end(folder / "target", models.target)
    return replace(models, target=target, draft=make_model(folder / "draft", seed=99, like=target, blur=0.05))


@pytest.fixture(scope="module")
def slow(ending: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slow"))
    cluster.add_coordinator()
    cluster.add_verifier(ending.target, *SLOW)
    cluster.add_drafter("model", ending.draft)
    cluster.add_drafter("ngram")
    yield cluster.start()
    cluster.stop()


def ignores_eos(index: int) -> bool:
    """Half of the prompts, so that full lengths and early ends are both there."""
    return index % 2 == 0


@pytest.fixture(params=[PROMPTS[::3], pytest.param(PROMPTS, marks=pytest.mark.prove)], ids=["some", "all"])
def prompts(request: pytest.FixtureRequest) -> list[str]:
    found: list[str] = request.param
    return found


@pytest.fixture
def reference(ending: Models, prompts: list[str]) -> list[list[int]]:
    """What transformers itself makes of the prompts, one at a time, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(ending.target)
    target = LlamaForCausalLM.from_pretrained(ending.target, dtype=torch.float32, attn_implementation="eager").eval()
    outputs = []
    for index, prompt in enumerate(prompts):
        target.generation_config.eos_token_id = None if ignores_eos(index) else tokenizer.eos_token_id
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=tokenizer.eos_token_id,
        )
        outputs.append(made[0, ids.shape[1] :].tolist())
    return outputs


@pytest.mark.timeout(400)
async def test_greedy_text_is_transformers_own(slow: Cluster, prompts: list[str], reference: list[list[int]]) -> None:
    started = time.monotonic()
    ways = [(0, "")] + [(gamma, drafter) for drafter in DRAFTERS for gamma in GAMMAS]
    requests = [
        ask(
            prompt,
            gamma=gamma,
            drafter=drafter,
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            ignore_eos=ignores_eos(index),
        )
        for gamma, drafter in ways
        for index, prompt in enumerate(prompts)
    ]
    outputs = await generate_all(slow.address, requests, timeout=300)
    print(f"{sum(len(output.token_ids) for output in outputs)} tokens in {time.monotonic() - started:.0f} s")
    accepted = dict.fromkeys(DRAFTERS, 0)
    for number, (gamma, drafter) in enumerate(ways):
        made = outputs[number * len(prompts) : (number + 1) * len(prompts)]
        for index, output in enumerate(made):
            assert output.token_ids == reference[index], f"γ {gamma}, {drafter or 'plain'}, prompt {prompts[index]!r}"
            check_consistent(output, gamma)
        if drafter:
            accepted[drafter] += sum(output.stats.accepted_tokens for output in made)
        report(made, gamma, drafter)
    lengths = [len(output) for output in reference]
    assert min(lengths) < MAX_TOKENS == max(lengths), "both full lengths and early ends were to be tried"
    assert all(count > 0 for count in accepted.values()), f"speculation did not happen: {accepted}"
    assert accepted["model"] > 0.3 * sum(lengths) * len(GAMMAS), f"the near copy is to be right often: {accepted}"


def check_consistent(output: Output, gamma: int) -> None:
    """What a reply says about itself agrees with its tokens."""
    stats = output.stats
    kinds = output.kinds
    assert output.finish is (FinishReason.LENGTH if len(kinds) == MAX_TOKENS else FinishReason.STOP)
    assert kinds.count(TokenKind.ACCEPTED) == stats.accepted_tokens
    assert stats.accepted_tokens <= stats.draft_tokens
    if gamma == 0:
        assert set(kinds) == {TokenKind.PLAIN}
        assert stats.draft_tokens == 0
    # Every step commits exactly one token of the target's own, but for a last one that a stop or the length cut off.
    assert len(kinds) - stats.accepted_tokens in (stats.steps, stats.steps - 1)
    assert stats.failovers == stats.drafter_losses == 0, "nobody died, so nothing may be replaced"


def report(outputs: list[Output], gamma: int, drafter: str) -> None:
    checked = sum(output.stats.draft_tokens for output in outputs)
    accepted = sum(output.stats.accepted_tokens for output in outputs)
    steps = sum(output.stats.steps for output in outputs)
    print(f"γ {gamma} {drafter or 'plain':6} accepted {accepted}/{checked} guesses in {steps} steps")
