"""Logits that are only guessed from: the likeliest tokens are right, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine import SessionTokens, StepResult
from outrider.engine.model_spec import build_spec
from outrider.engine.native import NativeEngine
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation import noise
from outrider.speculation.exponential_race import shared_key
from tests.unit.outrider.engine.native.tiles import tiles

VOCAB, HIDDEN = 1003, 72  # no multiples of any panel or block
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": 100, "num_attention_heads": 6, "head_dim": 20}
TOKENS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
INPUTS = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4))
MIX = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)) / HIDDEN**0.5


@pytest.fixture(params=[nullcontext, tiles], ids=["as on this processor", "in tiles"], autouse=True)
def packing(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def engine(threads: int) -> NativeEngine:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=VOCAB, num_hidden_layers=2, num_key_value_heads=2)).eval()
    info = ModelInfo("m", "f", vocab_size=VOCAB)
    return NativeEngine(build_spec(model), info, kv_tokens=256, weights="int8", threads=threads, exact=False)


def extend(runs: NativeEngine, count: int) -> StepResult:
    runs.free("s")
    runs.blocks.pool.evict_all()
    runs.extend([SessionTokens("s", TOKENS[:20])])
    found = runs.extend([SessionTokens("s", TOKENS[20 : 20 + count], hidden_from=0)])
    return StepResult(found.all_logits.clone(), found.counts, [found.hidden_states[0].clone()])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_likeliest_logits_are_those_of_all_bits(threads: int, count: int) -> None:
    runs = engine(threads)
    runs.prepare_chain(INPUTS, MIX, torch.arange(VOCAB))
    exact = extend(runs, count)
    runs.guesses = True
    rough = extend(runs, count)
    runs.guesses = False
    again = extend(runs, count)
    assert torch.equal(again.all_logits, exact.all_logits)
    assert torch.allclose(rough.hidden_states[0], exact.hidden_states[0], atol=2e-3)
    spread = exact.all_logits.std()
    values, likeliest = exact.all_logits.topk(4)
    assert torch.equal(rough.all_logits.topk(4).indices[:, 0], likeliest[:, 0])
    assert torch.allclose(rough.all_logits.gather(1, likeliest), values, atol=float(0.01 * spread))
    assert (rough.all_logits - exact.all_logits).std() < 0.2 * spread


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("given", [[5], [5, 7, 2]])
def test_a_chain_continues_by_the_likeliest_tokens(given: list[int], threads: int) -> None:
    """Each row's input is made here from the state before it. The given ones go through a step, as do later ones."""
    runs = engine(threads)
    before = torch.randn(len(given), HIDDEN, generator=torch.Generator().manual_seed(6))
    columns, computed = runs.chain(runs.prepare_chain(INPUTS, MIX, torch.arange(VOCAB)), "chain", before, given, 4)
    found, states = computed.logits[0].clone(), computed.hidden_states[0].clone()
    assert len(columns) == len(found) == len(states) == 4
    tokens = given
    for row, column in enumerate(columns):
        last = len(tokens) - 1
        inputs = INPUTS[tokens] + before @ MIX.T
        step = runs.extend(
            [SessionTokens("steps", tokens, logits_from=last, hidden_from=last, input_embeddings=inputs)]
        )
        likeliest = int(step.logits[0].argmax())
        assert column == likeliest == int(found[row].argmax())
        assert torch.allclose(found[row, likeliest], step.logits[0][0, likeliest], rtol=0.02)
        tokens, before = [column], states[row : row + 1]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_chain_draws_with_the_noise_that_the_target_shares(temperature: float) -> None:
    runs, given = engine(2), [5, 7]
    ids = torch.arange(VOCAB) * 31 + 7
    before = torch.randn(len(given), HIDDEN, generator=torch.Generator().manual_seed(6))
    params = SamplingParams(temperature=temperature, seed=11)
    keys = [shared_key(params, position) for position in range(30)]
    columns, computed = runs.chain(runs.prepare_chain(INPUTS, MIX, ids), "s", before, given, 30, (temperature, keys))
    assert len(set(columns)) > 2
    for column, logits, key in zip(columns, computed.logits[0], keys, strict=True):
        weights = torch.softmax(logits.double() / temperature, dim=-1)
        assert column == int(noise.exponential_race([key], ids, weights[None])[0])
    exact = runs.extend([SessionTokens("t", [3, 4], input_embeddings=INPUTS[[3, 4]])]).logits[0].clone()
    runs.guesses = False
    runs.free("t")
    runs.blocks.pool.evict_all()
    assert torch.equal(exact, runs.extend([SessionTokens("t", [3, 4], input_embeddings=INPUTS[[3, 4]])]).logits[0])
