"""The draw that drafter and target share, and its runners-up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation.exponential_race import shared_choices, shared_draw

PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    params=st.sampled_from(PARAMS),
    vocab=st.integers(1, 64),
    rows=st.integers(1, 4),
    ties=st.booleans(),
)
def test_the_first_choice_is_the_draw_itself(seed: int, params: dict, vocab: int, rows: int, ties: bool) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed % 2**32))
    if ties:
        logits = logits.round()
    given_params = SamplingParams(seed=seed, **params)
    positions = list(range(7, 7 + rows))
    choices = shared_choices(logits, given_params, positions, 3)
    assert [row[0][0] for row in choices] == shared_draw(logits, given_params, positions)
    for row in choices:
        assert 1 <= len(row) <= 3
        assert len({token for token, _ in row}) == len(row)
        shares = [share for _, share in row]
        assert shares == sorted(shares, reverse=True)
        assert sum(map(math.exp, shares)) <= 1 + 1e-9


def test_under_greedy_the_shares_are_the_models_own() -> None:
    logits = torch.tensor([[0.5, 0.1, 0.25, 0.15]]).log()
    ((first, second),) = shared_choices(logits, SamplingParams(temperature=0.0), [0], 2)
    assert (first[0], second[0]) == (0, 2)
    assert math.exp(first[1]) == pytest.approx(0.5)
    assert math.exp(second[1]) == pytest.approx(0.25)


def test_a_cut_leaves_fewer_choices() -> None:
    ((only,),) = shared_choices(torch.randn(1, 40), SamplingParams(top_k=1, seed=3), [0], 4)
    assert only[1] == pytest.approx(0.0)


def test_of_many_ids_the_winner_is_found_where_it_is_likely() -> None:
    """Peaked as a model's: the 64 likeliest hold nearly all."""
    logits = torch.randn(400, 5000, generator=torch.Generator().manual_seed(1)) * 4
    params = SamplingParams(seed=5, temperature=0.8)
    positions = list(range(400))
    found = [row[0][0] for row in shared_choices(logits, params, positions, 1)]
    drawn = shared_draw(logits, params, positions)
    assert sum(a == b for a, b in zip(found, drawn, strict=True)) > 380


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_runners_up_catch_what_a_model_like_this_one_draws(temperature: float) -> None:
    """And the shares say very roughly how often."""
    generator = torch.Generator().manual_seed(2)
    mine = torch.randn(2000, 50, generator=generator) * 2
    theirs = mine + torch.randn(2000, 50, generator=generator) * 0.7
    params = SamplingParams(seed=9, temperature=temperature)
    positions = list(range(2000))
    drawn = shared_draw(theirs, params, positions)
    choices = shared_choices(mine, params, positions, 3)
    caught = [sum(row[i][0] == token for row, token in zip(choices, drawn, strict=True)) / 2000 for i in range(3)]
    assert caught[0] > 0.6
    assert caught[0] > 2 * caught[1] > 3 * caught[2] > 0
    said = [sum(math.exp(row[i][1]) for row in choices) / 2000 for i in range(3)]
    assert said == pytest.approx(caught, abs=0.3)
