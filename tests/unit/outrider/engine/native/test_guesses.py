"""Logits that are only guessed from: the likeliest tokens are right, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine import SessionTokens
from outrider.engine.checks.reference import round_to_int4, round_to_int8
from outrider.engine.model_spec import build_spec
from outrider.engine.native import NativeEngine
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation import noise
from outrider.speculation.exponential_race import shared_key

VOCAB, HIDDEN = 1003, 72  # no multiples of any panel or block
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": 100, "num_attention_heads": 6, "head_dim": 20}
TOKENS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
INPUTS = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4))
MIX = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)) / HIDDEN**0.5


@dataclass(frozen=True, slots=True)
class Packing:
    """The format of an engine's weights, and how far guesses may be from what it computes otherwise."""

    weights: str
    rounding: float  # of hidden states
    of_spread: float  # of logits

    @property
    def mix(self) -> torch.Tensor:
        return (round_to_int4 if self.weights == "int4" else round_to_int8)(MIX)

    def engine(self, threads: int) -> NativeEngine:
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPE, vocab_size=VOCAB, num_hidden_layers=2, num_key_value_heads=2)
        spec, info = build_spec(LlamaForCausalLM(config).eval()), ModelInfo("m", "f", vocab_size=VOCAB)
        return NativeEngine(spec, info, kv_tokens=256, weights=self.weights, threads=threads, exact=False)


@pytest.fixture(params=["int8", "int4"], autouse=True)
def packing(request: pytest.FixtureRequest) -> Packing:
    return Packing("int4", 0.03, 0.03) if request.param == "int4" else Packing("int8", 2e-3, 0.01)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("given", [[5], [5, 7, 2], [5, 7, 2, 9, 11, 4, 8]])
def test_a_chain_continues_by_the_likeliest_tokens(packing: Packing, given: list[int], threads: int) -> None:
    """Each row's input is made here from the state before it. The given ones go through a step, as do later ones."""
    runs = packing.engine(threads)
    unguessed = runs.extend([SessionTokens("first", TOKENS)]).all_logits.clone()
    before = torch.randn(len(given), HIDDEN, generator=torch.Generator().manual_seed(6))
    columns, computed = runs.chain(
        runs.prepare_chain(INPUTS, packing.mix, torch.arange(VOCAB)), "chain", before, given, 4, (0.0, ())
    )
    found, states = computed.logits[0].clone(), computed.hidden_states[0].clone()
    assert len(columns) == len(found) == len(states) == 4
    tokens = given
    for row, column in enumerate(columns):
        last = len(tokens) - 1
        inputs = INPUTS[tokens] + before @ packing.mix.T
        step = runs.extend(
            [SessionTokens("steps", tokens, logits_from=last, hidden_from=last, input_embeddings=inputs)]
        )
        assert torch.allclose(states[row], step.hidden_states[0][0], atol=packing.rounding)
        exact, spread = step.logits[0][0], step.logits[0].std()
        values, likeliest = exact.topk(4)
        assert column == likeliest[0] == found[row].argmax()
        assert torch.allclose(found[row][likeliest], values, atol=float(packing.of_spread * spread))
        assert (found[row] - exact).std() < 0.2 * spread
        tokens, before = [column], states[row : row + 1]
    assert torch.equal(runs.extend([SessionTokens("second", TOKENS)]).all_logits, unguessed)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_chain_draws_with_the_noise_that_the_target_shares(packing: Packing, temperature: float) -> None:
    """From the logits that it returns, and as from all bits of the head, in steps."""
    runs, given = packing.engine(2), [5, 7]
    ids = torch.arange(VOCAB) * 31 + 7
    before = torch.randn(len(given), HIDDEN, generator=torch.Generator().manual_seed(6))
    params = SamplingParams(temperature=temperature, seed=11)
    keys = [shared_key(params, position) for position in range(30)]
    columns, computed = runs.chain(
        runs.prepare_chain(INPUTS, packing.mix, ids), "s", before, given, 30, (temperature, keys)
    )
    found, states = computed.logits[0].clone(), computed.hidden_states[0].clone()
    assert len(set(columns)) > 2
    tokens = given
    for row, (column, key) in enumerate(zip(columns, keys, strict=True)):
        last = len(tokens) - 1
        inputs = INPUTS[tokens] + before @ packing.mix.T
        step = runs.extend([SessionTokens("t", tokens, logits_from=last, hidden_from=last, input_embeddings=inputs)])
        for logits in (found[row], step.logits[0][0]):
            weights = torch.softmax(logits.double() / temperature, dim=-1)
            assert column == int(noise.exponential_race([key], ids, weights[None])[0])
        tokens, before = [column], states[row : row + 1]
